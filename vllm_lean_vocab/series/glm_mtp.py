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

MODELS = "vllm/model_executor/models"
GLM5NEXT = "vllm/models/glm5next"

PP_GROUP = "from vllm.distributed import get_pp_group"
SHARED_HEAD = "from .deepseek_mtp import SharedHead"
DEFERRED = "import defers_vocab, draft_embedding, skip_deferred_weights"
EMBEDDING = "import draft_embedding, skip_deferred_weights"


def embedding_is_deferred(predictor: str) -> Edit:
    """The embedding of a predictor, a class that holds the MTP layers."""
    return Replace(
        f"{predictor}.__init__",
        "self.embed_tokens = VocabParallelEmbedding(...)",
        "VocabParallelEmbedding",
        "draft_embedding(VocabParallelEmbedding, get_pp_group())",
    )


def head_is_deferred(layer: str) -> Edit:
    """The head of an MTP layer."""
    return Replace(
        f"{layer}.__init__",
        "self.shared_head = SharedHead(...)",
        "SharedHead(config=config, prefix=prefix, quant_config=quant_config)",
        "SharedHead(config=config, prefix=prefix, quant_config=quant_config, "
        "defer_lm_head=defers_vocab(get_pp_group()))",
    )


def tensors_go_by(draft: str) -> Edit:
    """Checkpoint tensors of what is deferred: the loop would look for parameters."""
    return Insert(
        f"{draft}.load_weights",
        "weights = skip_deferred_weights(self, weights)",
        after="params_dict = dict(self.named_parameters())",
    )


def glm5next(path: str, *others: Edit) -> In:
    return In(
        path,
        Insert("", PP_GROUP),
        embedding_is_deferred("Glm5NextMultiTokenPredictor"),
        tensors_go_by("Glm5NextMTP"),
        *others,
    )


PULL_REQUEST = PullRequest(
    id="glm_mtp",
    title="[Spec Decode] GLM MTP: leave the draft's vocabulary tables unallocated",
    builds_on=["deferred_vocab"],
    tests=["tests/model_executor/test_glm_mtp_vocab.py"],
    edits=[
        In(
            f"{MODELS}/glm4_moe_mtp.py",
            Insert("", PP_GROUP),
            Insert("", SHARED_HEAD),
            Insert("", f"from .deferred_vocab {DEFERRED}"),
            Remove("SharedHead"),
            head_is_deferred("Glm4MoeMultiTokenPredictorLayer"),
            embedding_is_deferred("Glm4MoeMultiTokenPredictor"),
            tensors_go_by("Glm4MoeMTP"),
        ),
        In(
            f"{MODELS}/glm4_moe_lite_mtp.py",
            Insert("", PP_GROUP),
            Insert("", SHARED_HEAD),
            Insert("", f"from .deferred_vocab {DEFERRED}"),
            Remove("SharedHead"),
            head_is_deferred("Glm4MoeLiteMultiTokenPredictorLayer"),
            embedding_is_deferred("Glm4MoeLiteMultiTokenPredictor"),
            tensors_go_by("Glm4MoeLiteMTP"),
        ),
        In(
            f"{MODELS}/glm_ocr_mtp.py",
            Insert("", PP_GROUP),
            Insert("", f"from .deferred_vocab {DEFERRED}"),
            head_is_deferred("GlmOcrMultiTokenPredictorLayer"),
            embedding_is_deferred("GlmOcrMultiTokenPredictor"),
            tensors_go_by("GlmOcrMTP"),
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
                glm5next(
                    f"{GLM5NEXT}/common/mtp.py",
                    Insert(
                        "",
                        f"from {MODELS.replace('/', '.')}.deferred_vocab {EMBEDDING}",
                    ),
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
                glm5next(
                    f"{GLM5NEXT}/nvidia/mtp.py",
                    Insert(
                        "", f"from {MODELS.replace('/', '.')}.deferred_vocab {DEFERRED}"
                    ),
                    head_is_deferred("Glm5NextMultiTokenPredictorLayer"),
                ),
            ],
        ),
    ],
)
