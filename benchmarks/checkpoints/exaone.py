# SPDX-License-Identifier: Apache-2.0
"""K-EXAONE checkpoints (``exaone_moe``)."""

from pathlib import Path
from typing import Any

from benchmarks.checkpoints.counting import (
    NUM_EXPERTS,
    CountingModel,
    NamedTensors,
    Shards,
)
from benchmarks.checkpoints.decoder import DecoderWeights


def write_exaone_moe(
    path: Path,
    *,
    vocab_size: int,
    hidden_size: int,
    num_nextn_predict_layers: int = 1,
    tied: bool = False,
    shards: Shards = "single",
    seed: int = 0,
) -> CountingModel:
    """Write a counting K-EXAONE checkpoint with MTP layers into a directory.

    Args:
        path: Directory to write to; made if missing, files in it are overwritten.
        vocab_size: Rows of the vocabulary tables.
        hidden_size: Hidden size, a multiple of 64.
        num_nextn_predict_layers: Number of MTP layers, two at most; vLLM wants the
            number of speculative tokens to be a multiple of it.
        tied: Whether the checkpoint has no LM head of its own.
        shards: ``single`` for one file, ``tables`` for one shard per table and one
            for everything else, with an index.
        seed: Seed of everything that is random.

    Returns:
        The checkpoint and what it generates.

    Raises:
        ValueError: If a size is not one that works.
    """
    weights = _ExaoneMoe(
        mtp_layers=num_nextn_predict_layers,
        tied=tied,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        seed=seed,
    )
    return weights.write(path, shards)


class _ExaoneMoe(DecoderWeights):
    """The tensors and the configuration of one checkpoint."""

    correction_bias = "e_score_correction_bias"

    def config(self) -> dict[str, Any]:
        if self.mtp_layers > self.num_layers:
            # vLLM reads an MTP layer's kind off the target's layer of its number.
            raise ValueError(f"more than {self.num_layers} MTP layers")
        return {
            "architectures": ["ExaoneMoEForCausalLM"],
            "model_type": "exaone_moe",
            **self.sizes(),
            **self.layer_sizes(),
            **self.expert_sizes(),
            **self.attention_sizes(),
            "num_experts": NUM_EXPERTS,
            "num_shared_experts": 1,
            "layer_types": ["full_attention"] * self.num_layers,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000},
        }

    def self_attention(self, prefix: str) -> NamedTensors:
        return self.attention(prefix)

    def draft(self) -> NamedTensors:
        return self.joined_layers(
            lambda prefix: self.layer(prefix, dense=True, counts=False)
        )
