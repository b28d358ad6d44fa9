# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5 checkpoints: dense or mixtures of experts, text-only or multimodal."""

from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from benchmarks.checkpoints.counting import (
    EXPERTS_PER_TOKEN,
    NOISE,
    NUM_EXPERTS,
    CountingModel,
    CountingWeights,
    Layout,
    NamedTensors,
    Shards,
    bf16,
)
from benchmarks.checkpoints.vision import NUM_POSITIONS, qwen_tower, vision_sizes
from benchmarks.tokenizer import QWEN3_VL

Quantization = Literal["w8a8"]

# The CPU kernels of the linear attention want heads of 64 or more.
LINEAR_HEADS = 2
LINEAR_HEAD_DIM = 64
CONV_KERNEL = 4
EXPERT_SIZE = 64


def write_qwen3_5(
    path: Path,
    *,
    vocab_size: int = 248_320,
    hidden_size: int = 512,
    tied: bool = False,
    layout: Layout = "text",
    moe: bool = False,
    shards: Shards = "single",
    quantization: Quantization | None = None,
    mtp_layers: int = 1,
    seed: int = 0,
) -> CountingModel:
    """Write a counting Qwen3.5 checkpoint with MTP layers into a directory.

    Args:
        path: Directory to write to; made if missing, files in it are overwritten.
        vocab_size: Rows of the vocabulary tables.
        hidden_size: Hidden size, a multiple of 64.
        tied: Whether the checkpoint has no LM head of its own.
        layout: ``text`` for a text-only checkpoint (``model.*``), ``multimodal``
            for one with a (minimal) vision tower (``model.language_model.*``).
        moe: Whether the MLPs are mixtures of experts.
        shards: ``single`` for one file, ``tables`` for one shard per table and one
            for everything else, with an index.
        quantization: ``w8a8`` stores the target's linear layers as int8 in the
            compressed-tensors format (a scale per channel, activations quantized
            per token). The LM head, the vision tower and the MTP layers stay
            bfloat16.
        mtp_layers: Number of MTP layers; vLLM wants the number of speculative
            tokens to be a multiple of it.
        seed: Seed of everything that is random.

    Returns:
        The checkpoint and what it generates.

    Raises:
        ValueError: If a size is not one the architecture can have, or if a
            mixture of experts is to be quantized, which is not supported.
    """
    if moe and quantization:
        raise ValueError("a quantized mixture of experts is not supported")
    weights = Qwen3_5Weights(
        layout=layout,
        moe=moe,
        quantization=quantization,
        tied=tied,
        mtp_layers=mtp_layers,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        seed=seed,
    )
    return weights.write(path, shards)


class Qwen3_5Weights(CountingWeights):
    """The tensors and the configuration of one checkpoint.

    Attributes:
        linear_norm_dtype: Data type of the linear attention's norm.
    """

    linear_norm_dtype: ClassVar[torch.dtype] = torch.float32
    # These norms multiply by one plus their weight.
    norm_weight = 0.0
    processor = QWEN3_VL

    def __init__(
        self,
        *,
        moe: bool,
        quantization: Quantization | None,
        mtp_layers: int,
        **options: Any,
    ) -> None:
        super().__init__(mtp_layers=mtp_layers, **options)
        self.moe = moe
        self.quantization = quantization
        # vLLM puts attention layers into groups as large as the number of linear
        # ones, and wants all draft layers in one group.
        linear = ["linear_attention"] * (mtp_layers + 1)
        self.layer_types = [*linear, "full_attention"]

    def config(self) -> dict[str, Any]:
        kind = "qwen3_5_moe" if self.moe else "qwen3_5"
        family = "Qwen3_5Moe" if self.moe else "Qwen3_5"
        quantized = {}
        if self.quantization:
            quantized = {"quantization_config": _quantization_config()}
        text = self.text_config() | {"model_type": f"{kind}_text"}
        if not self.multimodal:
            return {"architectures": [f"{family}ForCausalLM"], **text, **quantized}
        return {
            "architectures": [f"{family}ForConditionalGeneration"],
            "model_type": kind,
            **self.with_vision(text, {"model_type": kind, **self._vision_config()}),
            **quantized,
        }

    def _vision_config(self) -> dict[str, Any]:
        """Return the part of the configuration that describes the vision tower."""
        return {
            **vision_sizes(self.hidden),
            "num_position_embeddings": NUM_POSITIONS,
            "deepstack_visual_indexes": [],
            "hidden_act": "gelu_pytorch_tanh",
        }

    def text_config(self) -> dict[str, Any]:
        """Return the part of the configuration that describes the language model."""
        rope: dict[str, Any] = {
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
        }
        if self.multimodal:
            # Three sections that share the rotated eighth of a head's dimensions.
            rope |= {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
        mlp: dict[str, Any] = {"intermediate_size": self.hidden}
        if self.moe:
            mlp = {
                "num_experts": NUM_EXPERTS,
                "num_experts_per_tok": EXPERTS_PER_TOKEN,
                "moe_intermediate_size": EXPERT_SIZE,
                "shared_expert_intermediate_size": self.hidden,
            }
        return {
            **self.sizes(),
            **self.attention_sizes(),
            **mlp,
            "num_hidden_layers": len(self.layer_types),
            "layer_types": self.layer_types,
            "attn_output_gate": True,
            "linear_conv_kernel_dim": CONV_KERNEL,
            "linear_num_key_heads": LINEAR_HEADS,
            "linear_num_value_heads": LINEAR_HEADS,
            "linear_key_head_dim": LINEAR_HEAD_DIM,
            "linear_value_head_dim": LINEAR_HEAD_DIM,
            "mamba_ssm_dtype": "float32",
            "rope_parameters": rope,
            "mtp_num_hidden_layers": self.mtp_layers,
            "mtp_use_dedicated_embeddings": False,
        }

    def target(self) -> NamedTensors:
        tensors = self._bf16_target()
        return _quantized(tensors) if self.quantization else tensors

    def draft(self) -> NamedTensors:
        return self.joined_layers(
            lambda prefix: self._layer(prefix, "full_attention", counts=False)
        )

    def _bf16_target(self) -> NamedTensors:
        """Yield the target's tensors before they are quantized."""
        for index, layer_type in enumerate(self.layer_types):
            counts = index == len(self.layer_types) - 1
            prefix = f"{self.prefix}layers.{index}."
            yield from self._layer(prefix, layer_type, counts)
        yield f"{self.prefix}norm.weight", self.norm()
        if self.multimodal:
            yield from qwen_tower(self.hidden, self.generator)

    def _layer(self, prefix: str, layer_type: str, counts: bool) -> NamedTensors:
        """Yield one decoder layer, whose MLP counts or is noise."""
        yield f"{prefix}input_layernorm.weight", self.norm()
        yield f"{prefix}post_attention_layernorm.weight", self.norm()
        if layer_type == "full_attention":
            yield from self.attention(f"{prefix}self_attn.", gated=True)
        else:
            yield from self._linear_attention(f"{prefix}linear_attn.")
        mlp = f"{prefix}mlp."
        if not self.moe:
            yield from self.mlp(mlp, self.hidden, counts)
            return
        # A gate of zero passes half of the shared expert.
        yield f"{mlp}shared_expert_gate.weight", _zeros(1, self.hidden)
        yield from self.mixture(
            mlp, "shared_expert", counts, EXPERT_SIZE, shared_gain=2.0
        )

    def linear_projections(self, prefix: str, size: int) -> NamedTensors:
        """Yield what a gated delta net reads its input with.

        Args:
            prefix: Of the tensors' names.
            size: Size of all its heads together.
        """
        yield f"{prefix}in_proj_qkv.weight", self.matrix(3 * size, self.hidden)
        yield f"{prefix}in_proj_z.weight", self.matrix(size, self.hidden)
        yield f"{prefix}in_proj_b.weight", self.matrix(LINEAR_HEADS, self.hidden)
        yield f"{prefix}in_proj_a.weight", self.matrix(LINEAR_HEADS, self.hidden)

    def _linear_attention(self, prefix: str) -> NamedTensors:
        """Yield a gated delta net."""
        size = LINEAR_HEADS * LINEAR_HEAD_DIM
        yield from self.linear_projections(prefix, size)
        convolution = self.matrix(3 * size, CONV_KERNEL).unsqueeze(1)
        yield f"{prefix}conv1d.weight", convolution
        yield f"{prefix}A_log", torch.zeros(LINEAR_HEADS)
        yield f"{prefix}dt_bias", _zeros(LINEAR_HEADS) + 1
        # This norm multiplies by its weight, the others by one plus theirs.
        norm = torch.ones(LINEAR_HEAD_DIM, dtype=self.linear_norm_dtype)
        yield f"{prefix}norm.weight", norm
        yield f"{prefix}out_proj.weight", self.matrix(self.hidden, size, NOISE)


def _zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def _is_quantized(name: str) -> bool:
    """Say whether a target's tensor is the weight of a quantized linear layer."""
    *parts, layer, parameter = name.split(".")
    return (
        parameter == "weight"
        and (layer.endswith("_proj") or layer in {"in_proj_qkv", "in_proj_z"})
        and "visual" not in parts
    )


def _quantized(tensors: NamedTensors) -> NamedTensors:
    """Yield tensors with linear weights as int8 and a scale per output channel."""
    for name, tensor in tensors:
        if not _is_quantized(name):
            yield name, tensor
            continue
        weight = tensor.float()
        scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-8) / 127
        yield name, (weight / scale).round().to(torch.int8)
        yield f"{name}_scale", bf16(scale)


def _quantization_config() -> dict[str, Any]:
    """Return compressed-tensors' description of int8 weights and activations."""
    int8 = {"num_bits": 8, "type": "int", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": int8 | {"strategy": "channel", "dynamic": False},
                "input_activations": int8 | {"strategy": "token", "dynamic": True},
            }
        },
        "ignore": [
            "lm_head",
            "re:.*mtp.*",
            "re:.*visual.*",
            "re:.*linear_attn.in_proj_[ab]",
            "re:.*linear_attn.in_proj_ba",
            "re:.*conv1d",
        ],
    }
