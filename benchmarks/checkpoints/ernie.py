# SPDX-License-Identifier: Apache-2.0
"""ERNIE 4.5 checkpoints that are mixtures of experts (``ernie4_5_moe``)."""

from pathlib import Path
from typing import Any

from benchmarks.checkpoints.counting import (
    EXPERTS_PER_TOKEN,
    NUM_EXPERTS,
    CountingModel,
    NamedTensors,
    Shards,
)
from benchmarks.checkpoints.decoder import DecoderWeights


def write_ernie4_5_moe(
    path: Path,
    *,
    vocab_size: int,
    hidden_size: int,
    tied: bool = False,
    shards: Shards = "single",
    seed: int = 0,
) -> CountingModel:
    """Write a counting ERNIE 4.5 checkpoint with an MTP layer into a directory.

    It has one MTP layer: vLLM loads no more, and drafts one token at a time.

    Args:
        path: Directory to write to; made if missing, files in it are overwritten.
        vocab_size: Rows of the vocabulary tables.
        hidden_size: Hidden size, a multiple of 64.
        tied: Whether the checkpoint has no LM head of its own.
        shards: ``single`` for one file, ``tables`` for one shard per table and one
            for everything else, with an index.
        seed: Seed of everything that is random.

    Returns:
        The checkpoint and what it generates.

    Raises:
        ValueError: If a size is not one that works.
    """
    weights = _Ernie4_5Moe(
        mtp_layers=1,
        tied=tied,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        seed=seed,
    )
    return weights.write(path, shards)


class _Ernie4_5Moe(DecoderWeights):
    """The tensors and the configuration of one checkpoint."""

    correction_bias = "moe_statics.e_score_correction_bias"
    correction_shape = (1, NUM_EXPERTS)

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["Ernie4_5_MoeForCausalLM"],
            "model_type": "ernie4_5_moe",
            **self.sizes(),
            **self.layer_sizes(),
            **self.attention_sizes(),
            # Of the shared expert too, which counts.
            "moe_intermediate_size": self.hidden,
            "moe_num_experts": NUM_EXPERTS,
            "moe_num_shared_experts": 1,
            "moe_k": EXPERTS_PER_TOKEN,
            "moe_layer_start_index": self.dense_layers,
            "moe_layer_end_index": self.num_layers - 1,
            "moe_layer_interval": 1,
            "use_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500_000},
        }

    def self_attention(self, prefix: str) -> NamedTensors:
        return self.attention(prefix, norms=False)

    def draft(self) -> NamedTensors:
        yield "model.mtp_emb_norm.0.weight", self.norm()
        yield "model.mtp_hidden_norm.0.weight", self.norm()
        yield "model.mtp_linear_proj.0.weight", self.joining()
        yield from self.layer("model.mtp_block.0.", dense=True, counts=False)
