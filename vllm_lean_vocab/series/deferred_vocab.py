# SPDX-License-Identifier: Apache-2.0
"""Placeholders for a draft's vocabulary modules, and checks that none is left.

A worker's base may be imported before plugins are: there a function's body is edited,
imports included.
"""

from vllm_lean_vocab.edits import Edit, In, Insert, PullRequest, Replace

IMPORT = """
from vllm.model_executor.models.deferred_vocab import check_attached, deferred_modules
"""


def embedding_is_deferred(predictor: str) -> Edit:
    """The embedding of a draft's predictor, the class that holds its MTP layers."""
    return Replace(
        f"{predictor}.__init__",
        "self.embed_tokens = VocabParallelEmbedding(...)",
        "VocabParallelEmbedding",
        "draft_embedding(VocabParallelEmbedding, get_pp_group())",
    )


PULL_REQUEST = PullRequest(
    id="deferred_vocab",
    title="[Spec Decode] Placeholders for vocabulary modules a draft takes over",
    new_files=["vllm/model_executor/models/deferred_vocab.py"],
    tests=["tests/v1/spec_decode/test_deferred_vocab.py"],
    edits=[
        In(
            "vllm/v1/spec_decode/llm_base_proposer.py",
            Insert("", IMPORT),
            Insert(
                "SpecDecodeBaseProposer.load_model",
                "deferred = deferred_modules(self.model)",
                after="self.model = self._get_model()",
            ),
            Insert(
                "SpecDecodeBaseProposer.load_model",
                "check_attached(self.model, deferred)",
                after="self._maybe_share_lm_head(...)",
            ),
        ),
        In(
            "vllm/v1/worker/gpu/spec_decode/eagle/utils.py",
            Insert("", IMPORT),
            Insert(
                "load_eagle_model",
                "deferred = deferred_modules(eagle_model)",
                before="maybe_share_target_embed(...)",
            ),
            Insert(
                "load_eagle_model",
                "check_attached(eagle_model, deferred)",
                before="return eagle_model",
            ),
        ),
        In(
            "vllm/v1/worker/worker_base.py",
            # Where every executor comes by, whatever worker a platform brings.
            Insert(
                "WorkerWrapperBase.initialize_from_config",
                "from vllm.model_executor.models.deferred_vocab import check_none_left"
                "\ncheck_none_left()",
                before="kv_cache_config = kv_cache_configs[self.global_rank]",
            ),
        ),
    ],
)
