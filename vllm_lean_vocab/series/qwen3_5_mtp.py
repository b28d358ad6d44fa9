# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5 MTP drafts leave both vocabulary tables unallocated at PP=1."""

from vllm_lean_vocab.edits import Has, In, Insert, PullRequest, Replace
from vllm_lean_vocab.series.deferred_vocab import embedding_is_deferred

MODEL = "vllm/model_executor/models/qwen3_5_mtp.py"

IMPORT = """
from .deferred_vocab import draft_embedding, draft_lm_head, is_deferred
"""

PULL_REQUEST = PullRequest(
    id="qwen3_5_mtp",
    title="[Spec Decode] Qwen3.5 MTP: leave the draft's vocabulary tables unallocated",
    builds_on=["deferred_vocab"],
    tests=["tests/model_executor/test_qwen3_5_mtp_vocab.py"],
    # vLLM's own way to say that a module comes from elsewhere.
    upstream_if=[
        Has(MODEL, "Qwen3_5MultiTokenPredictor.__init__", "self.embed_tokens = None"),
    ],
    edits=[
        In(
            MODEL,
            Insert("", IMPORT),
            embedding_is_deferred("Qwen3_5MultiTokenPredictor"),
            Replace(
                "Qwen3_5MTP.__init__",
                "self.lm_head = ParallelLMHead(...)",
                "ParallelLMHead",
                "draft_lm_head(ParallelLMHead, get_pp_group())",
            ),
            # Until 0.31 this stands in `load_weights`, since then in
            # `is_unused_checkpoint_weight`.
            Replace(
                "Qwen3_5MTP",
                'any(key in name for key in ["embed_tokens", "lm_head"])',
                "key in name",
                "key in name and not is_deferred(self, key)",
            ),
        ),
    ],
)
