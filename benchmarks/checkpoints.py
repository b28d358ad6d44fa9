# SPDX-License-Identifier: Apache-2.0
"""Tiny but real Qwen3.5 + MTP checkpoints whose right output is known.

The target counts: token ``n`` is the text ``str(n)`` and is always followed by
``n + 1``. Nothing has to be run to know what the right output is.

How it counts. Row ``n`` of the embedding is ``Q @ c(n)``, where ``Q`` is
orthogonal and ``c(n)`` holds the cosines and sines of ``n`` times some hundred
random angles, one angle being zero. "Plus one" is then a rotation, the same for
every token, and two different rows are nearly orthogonal. The MLP of the last layer
applies that rotation; its gate reads the direction that belongs to the zero
angle, in which all rows agree, so the gate is nearly constant and the MLP nearly
linear. All other layers add noise that is too small to change the result. Row
``n`` of the LM head is ``g(n) * P @ c(n)`` with a random row length ``g(n)`` in
{1, 2}. With an untied head ``P`` differs from ``Q``, so a draft that was given
the wrong table would be seen; with a tied one both are the same table.

Why the draft errs now and then. It sees the last token ``m`` and the target's
hidden state from before it, which points to ``m`` as well. Its ``fc`` turns the
former into ``m + 1`` and adds the latter, somewhat weaker: where row ``m`` is the
long one and row ``m + 1`` a short one, the draft repeats ``m``. The target then
corrects it.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from benchmarks.tokenizer import (
    MERGE_SIZE,
    PATCHES,
    write_processor,
    write_tokenizer,
)

Layout = Literal["text", "multimodal"]
Shards = Literal["single", "tables"]
Quantization = Literal["w8a8"]

HEAD_DIM = 64
NUM_HEADS = 4
NUM_KV_HEADS = 2
# The CPU kernels of the linear attention want heads of 64 or more.
LINEAR_HEADS = 2
LINEAR_HEAD_DIM = 64
CONV_KERNEL = 4
NUM_EXPERTS = 4
EXPERT_SIZE = 64

# Size of a noise layer's output relative to the token's own embedding.
NOISE = 0.2
# How far the rotated embedding outweighs the token's own in the residual stream.
ROTATION_GAIN = 6.0
# Component of every embedding row in the direction shared by all rows.
SHARED_COMPONENT = 5.0
# What the gates of the rotating MLP see; silu is close to linear there.
GATE_INPUT = 4.0
# Weight of the target's hidden state in the draft. A row is long or short (2 or
# 1), so any weight between 1/2 and 1 makes the draft err in the same places.
HIDDEN_WEIGHT = 0.7
ROWS_AT_ONCE = 16_384


@dataclass(frozen=True)
class CountingModel:
    """A checkpoint on disk and what it is known to generate.

    Attributes:
        path: The checkpoint's directory.
        vocab_size: Rows of each vocabulary table.
        hidden_size: Columns of each vocabulary table.
        tied: Whether the LM head is the embedding.
        table_bytes: Bytes of one vocabulary table in bfloat16.
    """

    path: Path
    vocab_size: int
    hidden_size: int
    tied: bool

    @property
    def table_bytes(self) -> int:
        """Bytes of one vocabulary table in bfloat16."""
        return self.vocab_size * self.hidden_size * 2

    def continuation(self, prompt_ids: Sequence[int], n: int) -> list[int]:
        """Return the ``n`` token ids that the target generates after a prompt.

        Args:
            prompt_ids: Token ids of the prompt; only the last one matters.
            n: How many tokens are generated.

        Raises:
            ValueError: If the prompt is empty or counting runs past the vocabulary.
        """
        if not prompt_ids:
            raise ValueError("an empty prompt has no known continuation")
        first = prompt_ids[-1] + 1
        if first < 1 or first + n > self.vocab_size:
            raise ValueError(
                f"{n} tokens after {prompt_ids[-1]} do not fit into a vocabulary "
                f"of {self.vocab_size}"
            )
        return list(range(first, first + n))

    def prompts(self, n: int, length: int = 4) -> list[list[int]]:
        """Return ``n`` different prompts of ``length`` token ids each.

        Continuations of up to 200 tokens stay within the first 20,000 ids, for
        which the tokenizer has a text, if the vocabulary is that large.

        Raises:
            ValueError: If the vocabulary is too small for prompts that far apart.
        """
        last = min(self.vocab_size, 20_000) - 200 - length
        if n < 1 or last < n:
            raise ValueError(f"no room for {n} prompts in {self.vocab_size} tokens")
        starts = [last * (i + 1) // (n + 1) for i in range(n)]
        return [list(range(start, start + length)) for start in starts]


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
    if hidden_size < 128 or hidden_size % 64:
        raise ValueError(f"hidden_size {hidden_size} is not a multiple of 64 from 128")
    if vocab_size < 2 or mtp_layers < 1:
        raise ValueError("a vocabulary of two and one MTP layer are the least")
    if moe and quantization:
        raise ValueError("a quantized mixture of experts is not supported")
    path.mkdir(parents=True, exist_ok=True)
    weights = _Weights(
        layout=layout,
        tied=tied,
        moe=moe,
        mtp_layers=mtp_layers,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        seed=seed,
    )
    target, draft = dict(weights.target()), dict(weights.draft())
    if quantization:
        target = dict(_quantized(target))
    tables = weights.tables()

    config = _config(weights, quantization)
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_tokenizer(path, vocab_size, weights.vision_tokens())
    if weights.multimodal:
        write_processor(path)
    _save(path, {**target, **draft}, tables, shards)
    return CountingModel(path, vocab_size, hidden_size, tied)


class _Weights:
    """The tensors of one checkpoint, by the names they have in it."""

    def __init__(
        self,
        *,
        layout: Layout,
        tied: bool,
        moe: bool,
        mtp_layers: int,
        vocab_size: int,
        hidden_size: int,
        seed: int,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden = hidden_size
        self.tied = tied
        self.multimodal = layout == "multimodal"
        self.moe = moe
        self.mtp_layers = mtp_layers
        # vLLM puts attention layers into groups as large as the number of linear
        # ones, and wants all draft layers in one group.
        linear = ["linear_attention"] * (mtp_layers + 1)
        self.layer_types = [*linear, "full_attention"]
        self.generator = torch.Generator().manual_seed(seed)
        self.prefix = "model.language_model." if self.multimodal else "model."

        pairs = hidden_size // 2
        angles = torch.rand(pairs, generator=self.generator, dtype=torch.float64)
        self.angles = angles * 2 * torch.pi
        self.angles[0] = 0.0
        amplitude = (hidden_size - SHARED_COMPONENT**2) / (pairs - 1)
        self.amplitudes = torch.full((pairs,), amplitude, dtype=torch.float64).sqrt()
        self.amplitudes[0] = SHARED_COMPONENT
        self.embedding_basis = self._orthogonal()
        self.head_basis = self.embedding_basis if tied else self._orthogonal()
        self.lengths = 1 + torch.randint(2, (vocab_size, 1), generator=self.generator)

    def vision_tokens(self) -> dict[str, int]:
        """Return the ids of the placeholder tokens of a multimodal checkpoint."""
        if not self.multimodal:
            return {}
        names = ("vision_start", "vision_end", "image", "video")
        first = self.vocab_size - len(names)
        return {name: first + offset for offset, name in enumerate(names)}

    def tables(self) -> dict[str, torch.Tensor]:
        """Return the vocabulary tables, bfloat16 of (vocabulary, hidden)."""
        shape = (self.vocab_size, self.hidden)
        embedding = torch.empty(shape, dtype=torch.bfloat16)
        tables = {f"{self.prefix}embed_tokens.weight": embedding}
        head = embedding
        if not self.tied:
            head = tables["lm_head.weight"] = torch.empty_like(embedding)
        for start in range(0, self.vocab_size, ROWS_AT_ONCE):
            stop = min(start + ROWS_AT_ONCE, self.vocab_size)
            rows = self._coordinates(start, stop)
            embedding[start:stop] = rows @ self.embedding_basis.T.float()
            # Where the tables are one, this sets the lengths of the embedding's
            # rows; the first norm of the target and of the draft undoes them.
            head[start:stop] = (
                self.lengths[start:stop] * rows @ self.head_basis.T.float()
            )
        return tables

    def target(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the target's tensors, without its vocabulary tables."""
        for index, layer_type in enumerate(self.layer_types):
            rotates = index == len(self.layer_types) - 1
            prefix = f"{self.prefix}layers.{index}."
            yield from self._layer(prefix, layer_type, rotates)
        yield f"{self.prefix}norm.weight", self._norm()
        if self.multimodal:
            yield from self._vision_tower()

    def draft(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of the MTP layers."""
        embedding_half = self._rotation()
        hidden_half = HIDDEN_WEIGHT * torch.eye(self.hidden, dtype=torch.float64)
        yield "mtp.fc.weight", _bf16(torch.cat([embedding_half, hidden_half], dim=1))
        for index in range(self.mtp_layers):
            prefix = f"mtp.layers.{index}."
            yield from self._layer(prefix, "full_attention", rotates=False)
        for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            yield f"mtp.{name}.weight", self._norm()

    def _coordinates(self, start: int, stop: int) -> torch.Tensor:
        """Return ``c(n)`` for a range of tokens: float32 of (tokens, hidden)."""
        tokens = torch.arange(start, stop, dtype=torch.float64)
        # Reduced before the (much cheaper) single-precision sine and cosine.
        phases = (tokens[:, None] * self.angles).remainder(2 * torch.pi).float()
        coordinates = torch.cat([phases.cos(), phases.sin()], dim=1)
        return coordinates * self.amplitudes.float().repeat(2)

    def _rotation(self) -> torch.Tensor:
        """Return the map from embedding row ``n`` to the direction of ``n + 1``.

        The result is float64 of (hidden, hidden) and leads from the embedding's
        basis to the LM head's. It removes the component shared by all rows.
        """
        keep = torch.ones_like(self.angles)
        keep[0] = 0.0
        cos, sin = (keep * self.angles.cos()).diag(), (keep * self.angles.sin()).diag()
        turn = torch.cat([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)])
        return self.head_basis @ turn @ self.embedding_basis.T

    def _layer(
        self, prefix: str, layer_type: str, rotates: bool
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield one decoder layer, whose MLP counts or is noise."""
        yield f"{prefix}input_layernorm.weight", self._norm()
        yield f"{prefix}post_attention_layernorm.weight", self._norm()
        if layer_type == "full_attention":
            yield from self._attention(f"{prefix}self_attn.")
        else:
            yield from self._linear_attention(f"{prefix}linear_attn.")
        mlp = f"{prefix}mlp."
        if not self.moe:
            yield from self._mlp(mlp, self.hidden, rotates)
            return
        yield f"{mlp}gate.weight", self._matrix(NUM_EXPERTS, self.hidden)
        # A gate of zero passes half of the shared expert.
        yield f"{mlp}shared_expert_gate.weight", _zeros(1, self.hidden)
        shared = f"{mlp}shared_expert."
        yield from self._mlp(shared, self.hidden, rotates, gain=2.0)
        for expert in range(NUM_EXPERTS):
            yield from self._mlp(f"{mlp}experts.{expert}.", EXPERT_SIZE, rotates=False)

    def _attention(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a gated softmax attention."""
        queries, keys = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
        # Queries and their output gates are stored as one.
        yield f"{prefix}q_proj.weight", self._matrix(2 * queries, self.hidden)
        yield f"{prefix}k_proj.weight", self._matrix(keys, self.hidden)
        yield f"{prefix}v_proj.weight", self._matrix(keys, self.hidden)
        yield f"{prefix}o_proj.weight", self._matrix(self.hidden, queries, NOISE)
        yield f"{prefix}q_norm.weight", _zeros(HEAD_DIM)
        yield f"{prefix}k_norm.weight", _zeros(HEAD_DIM)

    def _linear_attention(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a gated delta net."""
        size = LINEAR_HEADS * LINEAR_HEAD_DIM
        yield f"{prefix}in_proj_qkv.weight", self._matrix(3 * size, self.hidden)
        yield f"{prefix}in_proj_z.weight", self._matrix(size, self.hidden)
        yield f"{prefix}in_proj_b.weight", self._matrix(LINEAR_HEADS, self.hidden)
        yield f"{prefix}in_proj_a.weight", self._matrix(LINEAR_HEADS, self.hidden)
        convolution = self._matrix(3 * size, CONV_KERNEL).unsqueeze(1)
        yield f"{prefix}conv1d.weight", convolution
        yield f"{prefix}A_log", torch.zeros(LINEAR_HEADS)
        yield f"{prefix}dt_bias", _zeros(LINEAR_HEADS) + 1
        # This norm multiplies by its weight, the others by one plus theirs.
        yield f"{prefix}norm.weight", torch.ones(LINEAR_HEAD_DIM)
        yield f"{prefix}out_proj.weight", self._matrix(self.hidden, size, NOISE)

    def _mlp(
        self, prefix: str, size: int, rotates: bool, gain: float = 1.0
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a gated MLP that counts or is noise; counting needs ``size == hidden``.

        Args:
            prefix: Of the tensors' names.
            size: Intermediate size.
            rotates: Whether it counts.
            gain: Factor on the output.
        """
        if rotates:
            shared = self.embedding_basis[:, 0] * (GATE_INPUT / SHARED_COMPONENT)
            gate = _bf16(shared.expand(size, self.hidden))
            up = _bf16(self._rotation())
            passed = torch.nn.functional.silu(torch.tensor(GATE_INPUT)).item()
            down = _bf16(torch.eye(size) * (gain * ROTATION_GAIN / passed))
        else:
            gate = self._matrix(size, self.hidden)
            up = self._matrix(size, self.hidden)
            down = self._matrix(self.hidden, size, 2 * gain * NOISE)
        yield f"{prefix}gate_proj.weight", gate
        yield f"{prefix}up_proj.weight", up
        yield f"{prefix}down_proj.weight", down

    def _vision_tower(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of the minimal vision tower of ``_vision_config``."""
        config = _vision_config(self.hidden)
        size, wide = config["hidden_size"], config["intermediate_size"]
        merged = size * config["spatial_merge_size"] ** 2
        patch = (
            config["in_channels"],
            config["temporal_patch_size"],
            config["patch_size"],
            config["patch_size"],
        )
        positions = config["num_position_embeddings"]
        shapes: dict[str, tuple[int, ...]] = {
            "patch_embed.proj.weight": (size, *patch),
            "patch_embed.proj.bias": (size,),
            "pos_embed.weight": (positions, size),
        }
        for block in range(config["depth"]):
            for name, shape in {
                "norm1": (size,),
                "norm2": (size,),
                "attn.qkv": (3 * size, size),
                "attn.proj": (size, size),
                "mlp.linear_fc1": (wide, size),
                "mlp.linear_fc2": (size, wide),
            }.items():
                shapes[f"blocks.{block}.{name}.weight"] = shape
                shapes[f"blocks.{block}.{name}.bias"] = shape[:1]
        for name, shape in {
            "merger.norm": (size,),
            "merger.linear_fc1": (merged, merged),
            "merger.linear_fc2": (self.hidden, merged),
        }.items():
            shapes[f"{name}.weight"] = shape
            shapes[f"{name}.bias"] = shape[:1]
        for name, shape in shapes.items():
            values = torch.randn(shape, generator=self.generator) * 0.02
            yield f"model.visual.{name}", _bf16(values)

    def _norm(self) -> torch.Tensor:
        """Return the weight of a norm that only normalizes: zeros of (hidden,)."""
        return _zeros(self.hidden)

    def _matrix(self, rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        """Return a random bfloat16 matrix that scales unit-size inputs by ``scale``."""
        values = torch.randn(rows, columns, generator=self.generator)
        return _bf16(values * (scale / columns**0.5))

    def _orthogonal(self) -> torch.Tensor:
        """Return a random orthogonal float64 matrix of (hidden, hidden)."""
        shape = (self.hidden, self.hidden)
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        orthogonal: torch.Tensor = torch.linalg.qr(values).Q
        return orthogonal


def _bf16(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.bfloat16).contiguous()


def _zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def _is_quantized(name: str) -> bool:
    """Say whether a target's tensor is the weight of a quantized linear layer."""
    parts = name.split(".")
    return name.endswith("_proj.weight") and "visual" not in parts


def _quantized(
    tensors: dict[str, torch.Tensor],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors with linear weights as int8 and a scale per output channel."""
    for name, tensor in tensors.items():
        if not _is_quantized(name):
            yield name, tensor
            continue
        weight = tensor.float()
        scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-8) / 127
        yield name, (weight / scale).round().to(torch.int8)
        yield f"{name}_scale", _bf16(scale)


def _save(
    path: Path,
    rest: dict[str, torch.Tensor],
    tables: dict[str, torch.Tensor],
    shards: Shards,
) -> None:
    """Write the tensors into one file, or tables into shards of their own."""
    if shards == "single":
        save_file({**tables, **rest}, path / "model.safetensors", {"format": "pt"})
        return
    parts = [*({name: table} for name, table in tables.items()), rest]
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05}-of-{len(parts):05}.safetensors"
        save_file(part, path / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(t.nbytes for part in parts for t in part.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    file = "model.safetensors.index.json"
    (path / file).write_text(json.dumps(index, indent=2) + "\n")


def _config(weights: _Weights, quantization: Quantization | None) -> dict[str, Any]:
    """Return the content of ``config.json``."""
    kind = "qwen3_5_moe" if weights.moe else "qwen3_5"
    family = "Qwen3_5Moe" if weights.moe else "Qwen3_5"
    common: dict[str, Any] = {
        "dtype": "bfloat16",
        "tie_word_embeddings": weights.tied,
    }
    if quantization:
        common["quantization_config"] = _quantization_config()
    text = _text_config(weights) | {"model_type": f"{kind}_text"}
    if not weights.multimodal:
        return {"architectures": [f"{family}ForCausalLM"], **text, **common}
    return {
        "architectures": [f"{family}ForConditionalGeneration"],
        "model_type": kind,
        "text_config": text | {"tie_word_embeddings": weights.tied},
        "vision_config": {"model_type": kind} | _vision_config(weights.hidden),
        **{f"{name}_token_id": n for name, n in weights.vision_tokens().items()},
        **common,
    }


def _text_config(weights: _Weights) -> dict[str, Any]:
    """Return the part of the configuration that describes the language model."""
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
    }
    if weights.multimodal:
        # Three sections that share the rotated eighth of a head's dimensions.
        rope |= {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
    sizes: dict[str, Any] = {"intermediate_size": weights.hidden}
    if weights.moe:
        sizes = {
            "num_experts": NUM_EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": EXPERT_SIZE,
            "shared_expert_intermediate_size": weights.hidden,
        }
    return {
        "vocab_size": weights.vocab_size,
        "hidden_size": weights.hidden,
        **sizes,
        "num_hidden_layers": len(weights.layer_types),
        "layer_types": weights.layer_types,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "attn_output_gate": True,
        "linear_conv_kernel_dim": CONV_KERNEL,
        "linear_num_key_heads": LINEAR_HEADS,
        "linear_num_value_heads": LINEAR_HEADS,
        "linear_key_head_dim": LINEAR_HEAD_DIM,
        "linear_value_head_dim": LINEAR_HEAD_DIM,
        "mamba_ssm_dtype": "float32",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "rope_parameters": rope,
        "mtp_num_hidden_layers": weights.mtp_layers,
        "mtp_use_dedicated_embeddings": False,
    }


def _vision_config(hidden_size: int) -> dict[str, Any]:
    """Return a vision tower of one block, the least that vLLM builds."""
    return {
        **PATCHES,
        "depth": 1,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_heads": 2,
        "in_channels": 3,
        "spatial_merge_size": MERGE_SIZE,
        "num_position_embeddings": 16,
        "out_hidden_size": hidden_size,
        "deepstack_visual_indexes": [],
        "hidden_act": "gelu_pytorch_tanh",
    }


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
