# SPDX-License-Identifier: Apache-2.0
"""GLM MTP drafts leave their vocabulary tables unallocated at PP=1.

Every class builds its heads through `SharedHead` of `deepseek_mtp`, which knows how to
leave one out. vLLM 0.30 has no such option; 0.31 to 0.33 have it, for one class.
"""

from vllm_lean_vocab.edits import (
    AddParameter,
    Edit,
    In,
    Insert,
    PullRequest,
    Remove,
    Replace,
    Variant,
)
from vllm_lean_vocab.series.deferred_vocab import embedding_is_deferred

MODELS = "vllm/model_executor/models"
GLM5NEXT = "vllm/models/glm5next"

SHARED_HEAD = "from .deepseek_mtp import SharedHead"
DEFERRED = "import defers_vocab, draft_embedding, skip_deferred_weights"
EMBEDDING = "import draft_embedding, skip_deferred_weights"
ABSOLUTE = "from vllm.model_executor.models.deferred_vocab"


def head_is_deferred(family: str) -> Edit:
    """The head of an MTP layer."""
    return Replace(
        f"{family}MultiTokenPredictorLayer.__init__",
        "self.shared_head = SharedHead(...)",
        "SharedHead(config=config, prefix=prefix, quant_config=quant_config)",
        "SharedHead(config=config, prefix=prefix, quant_config=quant_config, "
        "defer_lm_head=defers_vocab(get_pp_group()))",
    )


def draft(path: str, family: str, *others: Edit) -> In:
    """A draft's file: what all take, beside the others."""
    return In(
        path,
        Insert("", "from vllm.distributed import get_pp_group"),
        *others,
        embedding_is_deferred(f"{family}MultiTokenPredictor"),
        # Of what is deferred, too, the loop would look up a parameter.
        Insert(
            f"{family}MTP.load_weights",
            "weights = skip_deferred_weights(self, weights)",
            after="params_dict = dict(self.named_parameters())",
        ),
    )


PULL_REQUEST = PullRequest(
    id="glm_mtp",
    title="[Spec Decode] GLM MTP: leave the draft's vocabulary tables unallocated",
    builds_on=["deferred_vocab"],
    tests=["tests/model_executor/test_glm_mtp_vocab.py"],
    edits=[
        draft(
            f"{MODELS}/glm4_moe_mtp.py",
            "Glm4Moe",
            Insert("", SHARED_HEAD),
            Insert("", f"from .deferred_vocab {DEFERRED}"),
            Remove("SharedHead"),
            head_is_deferred("Glm4Moe"),
        ),
        draft(
            f"{MODELS}/glm4_moe_lite_mtp.py",
            "Glm4MoeLite",
            Insert("", SHARED_HEAD),
            Insert("", f"from .deferred_vocab {DEFERRED}"),
            Remove("SharedHead"),
            head_is_deferred("Glm4MoeLite"),
        ),
        draft(
            f"{MODELS}/glm_ocr_mtp.py",
            "GlmOcr",
            Insert("", f"from .deferred_vocab {DEFERRED}"),
            head_is_deferred("GlmOcr"),
        ),
    ],
    variants=[
        Variant(
            "vLLM leaves out GLM-5.3's head (head = None), and allocates the others",
            [
                In(
                    f"{MODELS}/deepseek_mtp.py",
                    Insert("", "from .deferred_vocab import DeferredLMHead"),
                    Replace(
                        "SharedHead.__init__",
                        "self.head = None",
                        "None",
                        'DeferredLMHead(prefix=maybe_prefix(prefix, "head"))',
                    ),
                ),
                draft(
                    f"{GLM5NEXT}/common/mtp.py",
                    "Glm5Next",
                    Insert("", f"{ABSOLUTE} {EMBEDDING}"),
                ),
            ],
        ),
        Variant(
            "vLLM allocates every head",
            [
                In(
                    f"{MODELS}/deepseek_mtp.py",
                    Insert("", "from .deferred_vocab import DeferredLMHead"),
                    AddParameter("SharedHead.__init__", "defer_lm_head: bool = False"),
                    Replace(
                        "SharedHead.__init__",
                        "self.head = ParallelLMHead(...)",
                        "ParallelLMHead",
                        "(DeferredLMHead if defer_lm_head else ParallelLMHead)",
                    ),
                ),
                draft(
                    f"{GLM5NEXT}/nvidia/mtp.py",
                    "Glm5Next",
                    Insert("", f"{ABSOLUTE} {DEFERRED}"),
                    head_is_deferred("Glm5Next"),
                ),
            ],
        ),
    ],
)
