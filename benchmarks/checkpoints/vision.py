# SPDX-License-Identifier: Apache-2.0
"""Vision towers of one block, the least that vLLM builds; their weights are random."""

from typing import Any

import torch

from benchmarks.checkpoints.counting import NamedTensors, bf16
from benchmarks.tokenizer import MERGE_SIZE, PATCHES

CHANNELS = 3
SIZE = 128
NUM_HEADS = 2
# Of Qwen's learned positions.
NUM_POSITIONS = 16

PATCH = (PATCHES["temporal_patch_size"], PATCHES["patch_size"], PATCHES["patch_size"])
Shapes = dict[str, tuple[int, ...]]


def vision_sizes(hidden_size: int) -> dict[str, Any]:
    """Return what every vision tower's configuration has.

    Args:
        hidden_size: Hidden size of the language model.
    """
    return {
        **PATCHES,
        "depth": 1,
        "hidden_size": SIZE,
        "intermediate_size": SIZE,
        "num_heads": NUM_HEADS,
        "in_channels": CHANNELS,
        "spatial_merge_size": MERGE_SIZE,
        "out_hidden_size": hidden_size,
    }


def qwen_tower(hidden_size: int, generator: torch.Generator) -> NamedTensors:
    """Yield the tensors of a Qwen3.5 checkpoint's vision tower.

    Args:
        hidden_size: Hidden size of the language model.
        generator: What the weights are drawn from.
    """
    merged = SIZE * MERGE_SIZE**2
    shapes: Shapes = {
        **_with_biases({"patch_embed.proj": (SIZE, CHANNELS, *PATCH)}),
        "pos_embed.weight": (NUM_POSITIONS, SIZE),
        **_with_biases(
            {
                "blocks.0.norm1": (SIZE,),
                "blocks.0.norm2": (SIZE,),
                "blocks.0.attn.qkv": (3 * SIZE, SIZE),
                "blocks.0.attn.proj": (SIZE, SIZE),
                "blocks.0.mlp.linear_fc1": (SIZE, SIZE),
                "blocks.0.mlp.linear_fc2": (SIZE, SIZE),
                "merger.norm": (SIZE,),
                "merger.linear_fc1": (merged, merged),
                "merger.linear_fc2": (hidden_size, merged),
            }
        ),
    }
    return _random(shapes, generator)


def glm_tower(hidden_size: int, generator: torch.Generator) -> NamedTensors:
    """Yield the tensors of a GLM-OCR or GLM-5.3-Flash checkpoint's vision tower.

    The merger is as wide as the language model.

    Args:
        hidden_size: Hidden size of the language model.
        generator: What the weights are drawn from.
    """
    shapes = _with_biases(
        {
            "patch_embed.proj": (SIZE, CHANNELS, *PATCH),
            "blocks.0.attn.qkv": (3 * SIZE, SIZE),
            "blocks.0.attn.proj": (SIZE, SIZE),
            "blocks.0.mlp.gate_proj": (SIZE, SIZE),
            "blocks.0.mlp.up_proj": (SIZE, SIZE),
            "blocks.0.mlp.down_proj": (SIZE, SIZE),
            "downsample": (hidden_size, SIZE, MERGE_SIZE, MERGE_SIZE),
            "merger.post_projection_norm": (hidden_size,),
        }
    )
    for norm in ("norm1", "norm2"):
        shapes[f"blocks.0.{norm}.weight"] = (SIZE,)
    for norm in ("q_norm", "k_norm"):
        shapes[f"blocks.0.attn.{norm}.weight"] = (SIZE // NUM_HEADS,)
    shapes["post_layernorm.weight"] = (SIZE,)
    for name in ("proj", "gate_proj", "up_proj", "down_proj"):
        shapes[f"merger.{name}.weight"] = (hidden_size, hidden_size)
    return _random(shapes, generator)


def _with_biases(shapes: Shapes) -> Shapes:
    """Return the shapes of layers' weights and biases, given those of the weights."""
    both: Shapes = {}
    for name, shape in shapes.items():
        both[f"{name}.weight"] = shape
        both[f"{name}.bias"] = shape[:1]
    return both


def _random(shapes: Shapes, generator: torch.Generator) -> NamedTensors:
    """Yield small random tensors under the names of a checkpoint's."""
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator) * 0.02
        yield f"model.visual.{name}", bf16(values)
