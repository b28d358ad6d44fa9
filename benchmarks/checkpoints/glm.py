# SPDX-License-Identifier: Apache-2.0
"""GLM checkpoints: GLM-4.5 and 4.6 (``glm4_moe``) and 4.7-Flash (``glm4_moe_lite``)."""

from pathlib import Path
from typing import Any

from benchmarks.checkpoints.counting import CountingModel, NamedTensors, Shards
from benchmarks.checkpoints.nextn import NextnWeights

ROPE_THETA = 1_000_000


def write_glm4_moe(
    path: Path,
    *,
    vocab_size: int,
    hidden_size: int,
    num_nextn_predict_layers: int = 1,
    shards: Shards = "single",
    mtp_tables: bool = True,
    seed: int = 0,
) -> CountingModel:
    """Write a counting GLM-4.5 checkpoint with MTP layers into a directory.

    Args:
        path: Directory to write to; made if missing, files in it are overwritten.
        vocab_size: Rows of the vocabulary tables.
        hidden_size: Hidden size, a multiple of 64.
        num_nextn_predict_layers: Number of MTP layers; vLLM wants the number of
            speculative tokens to be a multiple of it.
        shards: ``single`` for one file, ``tables`` for one shard per table and one
            for everything else, with an index.
        mtp_tables: Whether every MTP layer has copies of the target's vocabulary
            tables, as in official checkpoints.
        seed: Seed of everything that is random.

    Returns:
        The checkpoint and what it generates.

    Raises:
        ValueError: If a size is not one that works.
    """
    weights = _Glm4Moe(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_nextn_predict_layers=num_nextn_predict_layers,
        mtp_tables=mtp_tables,
        seed=seed,
    )
    return weights.write(path, shards)


def write_glm4_moe_lite(
    path: Path,
    *,
    vocab_size: int,
    hidden_size: int,
    num_nextn_predict_layers: int = 1,
    shards: Shards = "single",
    mtp_tables: bool = True,
    seed: int = 0,
) -> CountingModel:
    """Write a counting GLM-4.7-Flash checkpoint with MTP layers into a directory.

    Args, results and errors are those of ``write_glm4_moe``.
    """
    weights = _Glm4MoeLite(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_nextn_predict_layers=num_nextn_predict_layers,
        mtp_tables=mtp_tables,
        seed=seed,
    )
    return weights.write(path, shards)


class _Glm4Moe(NextnWeights):
    """The tensors and the configuration of one checkpoint."""

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            **self.sizes(),
            **self.layer_sizes(),
            **self.expert_sizes(),
            **self.attention_sizes(),
            "use_qk_norm": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": ROPE_THETA,
                "partial_rotary_factor": 0.5,
            },
        }

    def self_attention(self, prefix: str) -> NamedTensors:
        return self.attention(prefix)


class _Glm4MoeLite(NextnWeights):
    """The tensors and the configuration of one checkpoint."""

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["Glm4MoeLiteForCausalLM"],
            "model_type": "glm4_moe_lite",
            **self.sizes(),
            **self.layer_sizes(),
            **self.expert_sizes(),
            **self.latent_attention_sizes(),
            "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        }

    def self_attention(self, prefix: str) -> NamedTensors:
        return self.latent_attention(prefix)
