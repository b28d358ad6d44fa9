# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next checkpoints (``qwen3_next``): Qwen3.5's mixtures of experts, nearly."""

from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoints.counting import CountingModel, NamedTensors, Shards
from benchmarks.checkpoints.qwen3_5 import LINEAR_HEADS, Qwen3_5Weights


def write_qwen3_next(
    path: Path,
    *,
    vocab_size: int,
    hidden_size: int,
    shards: Shards = "single",
    mtp_layers: int = 1,
    seed: int = 0,
) -> CountingModel:
    """Write a counting Qwen3-Next checkpoint with MTP layers into a directory.

    Args, results and errors are those of ``write_qwen3_5``. vLLM never ties the LM
    head to the embedding, and of several MTP layers it uses the first.
    """
    weights = _Qwen3Next(
        moe=True,
        quantization=None,
        mtp_layers=mtp_layers,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        seed=seed,
    )
    return weights.write(path, shards)


class _Qwen3Next(Qwen3_5Weights):
    """The tensors and the configuration of one checkpoint."""

    linear_norm_dtype = torch.bfloat16

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            **self.text_config(),
            "intermediate_size": self.hidden,
            "norm_topk_prob": True,
            "num_nextn_predict_layers": self.mtp_layers,
        }

    def linear_projections(self, prefix: str, size: int) -> NamedTensors:
        # Both are interleaved by head, which random rows need not mind.
        yield f"{prefix}in_proj_qkvz.weight", self.matrix(4 * size, self.hidden)
        yield f"{prefix}in_proj_ba.weight", self.matrix(2 * LINEAR_HEADS, self.hidden)
