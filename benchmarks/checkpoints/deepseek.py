# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3 checkpoints (``deepseek_v3``)."""

from pathlib import Path
from typing import Any

from benchmarks.checkpoints.counting import CountingModel, NamedTensors, Shards
from benchmarks.checkpoints.nextn import NextnWeights


def write_deepseek_v3(
    path: Path,
    *,
    vocab_size: int,
    hidden_size: int,
    num_nextn_predict_layers: int = 1,
    shards: Shards = "single",
    mtp_tables: bool = True,
    seed: int = 0,
) -> CountingModel:
    """Write a counting DeepSeek-V3 checkpoint with MTP layers into a directory.

    Args, results and errors are those of ``write_glm4_moe``.
    """
    weights = _DeepseekV3(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_nextn_predict_layers=num_nextn_predict_layers,
        mtp_tables=mtp_tables,
        seed=seed,
    )
    return weights.write(path, shards)


class _DeepseekV3(NextnWeights):
    """The tensors and the configuration of one checkpoint."""

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            **self.sizes(),
            **self.layer_sizes(),
            **self.expert_sizes(),
            **self.latent_attention_sizes(),
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000},
        }

    def self_attention(self, prefix: str) -> NamedTensors:
        return self.latent_attention(prefix)
