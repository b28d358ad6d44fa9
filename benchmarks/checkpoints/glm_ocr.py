# SPDX-License-Identifier: Apache-2.0
"""GLM-OCR checkpoints: dense and multimodal, with MTP layers like those of GLM-4."""

from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoints.counting import (
    NOISE,
    ROTATION_GAIN,
    CountingModel,
    NamedTensors,
)
from benchmarks.checkpoints.nextn import NextnWeights
from benchmarks.checkpoints.vision import glm_tower, vision_sizes
from benchmarks.tokenizer import GLM_46V


def write_glm_ocr(
    path: Path,
    *,
    vocab_size: int,
    hidden_size: int,
    num_nextn_predict_layers: int = 1,
    mtp_tables: bool = True,
    seed: int = 0,
) -> CountingModel:
    """Write a counting GLM-OCR checkpoint with MTP layers into a directory.

    Args, results and errors are those of ``write_glm4_moe``, without ``shards``.
    """
    weights = _GlmOcr(
        layout="multimodal",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_nextn_predict_layers=num_nextn_predict_layers,
        mtp_tables=mtp_tables,
        seed=seed,
    )
    return weights.write(path)


class _GlmOcr(NextnWeights):
    """The tensors and the configuration of one checkpoint."""

    processor = GLM_46V

    def config(self) -> dict[str, Any]:
        text = {
            "model_type": "glm_ocr_text",
            **self.sizes(),
            **self.layer_sizes(),
            **self.attention_sizes(),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000,
                "partial_rotary_factor": 1.0,
                # Three sections that share the half of a head's dimensions.
                "mrope_section": [8, 12, 12],
            },
        }
        vision = {"model_type": "glm_ocr_vision", **vision_sizes(self.hidden)}
        return {
            "architectures": ["GlmOcrForConditionalGeneration"],
            "model_type": "glm_ocr",
            **self.with_vision(text, vision),
        }

    def target(self) -> NamedTensors:
        yield from super().target()
        yield from glm_tower(self.hidden, self.generator)

    def layer(self, prefix: str, dense: bool, counts: bool) -> NamedTensors:
        yield from super().layer(prefix, dense=True, counts=counts)
        # What attention and MLP add is normalized first: these norms set its size.
        added = self.norm() * (ROTATION_GAIN if counts else NOISE)
        yield f"{prefix}post_self_attn_layernorm.weight", self.norm() * NOISE
        yield f"{prefix}post_mlp_layernorm.weight", added

    def self_attention(self, prefix: str) -> NamedTensors:
        return self.attention(prefix, norms=False)

    def mlp(
        self, prefix: str, size: int, counts: bool, gain: float = 1.0
    ) -> NamedTensors:
        gate, up, down = (t for _, t in super().mlp(prefix, size, counts, gain))
        yield f"{prefix}gate_up_proj.weight", torch.cat([gate, up])
        yield f"{prefix}down_proj.weight", down
