# SPDX-License-Identifier: Apache-2.0
"""What families share whose checkpoints are laid out like DeepSeek-V3's.

The MTP layers are stored as layers behind the target's last one, each with copies
of the target's vocabulary tables. All layers but the first, dense ones are mixtures
of experts.
"""

from abc import abstractmethod
from typing import Any, ClassVar

import torch

from benchmarks.checkpoints.counting import (
    EXPERTS_PER_TOKEN,
    NOISE,
    NUM_EXPERTS,
    NUM_HEADS,
    CountingWeights,
    NamedTensors,
)

# Multi-head latent attention. The CPU kernels are compiled for these sizes.
KV_LORA_RANK = 512
ROPE_HEAD_DIM = 64
NOPE_HEAD_DIM = 128
V_HEAD_DIM = 128
# Free to choose.
Q_LORA_RANK = 128


class NextnWeights(CountingWeights):
    """The tensors and the configuration of one checkpoint.

    A subclass says which attention the layers have.

    Attributes:
        num_layers: Number of the target's layers.
        dense_layers: How many of them, the first ones, are no mixtures of experts.
        rope_head_dim: Size of the part of a query or key of the latent attention that
            depends on the position.
    """

    num_layers: ClassVar[int] = 2
    dense_layers: ClassVar[int] = 1
    rope_head_dim: ClassVar[int] = ROPE_HEAD_DIM

    def __init__(
        self, *, num_nextn_predict_layers: int, mtp_tables: bool, **options: Any
    ) -> None:
        """Draw what is random about counting.

        Args:
            num_nextn_predict_layers: Number of MTP layers.
            mtp_tables: Whether each of them has copies of the vocabulary tables.
            **options: Further arguments of ``CountingWeights``.
        """
        super().__init__(mtp_layers=num_nextn_predict_layers, **options)
        numbers = range(self.num_layers, self.num_layers + self.mtp_layers)
        self.mtp_prefixes = [f"{self.prefix}layers.{n}." for n in numbers]
        self.mtp_tables = mtp_tables

    @abstractmethod
    def self_attention(self, prefix: str) -> NamedTensors:
        """Yield the attention of one layer; its tensors' names start with a prefix."""

    def tables(self) -> dict[str, torch.Tensor]:
        tables = super().tables()
        if self.mtp_tables:
            embedding, head = tables.values()
            for prefix in self.mtp_prefixes:
                # One file can't have two names for the same memory.
                tables[f"{prefix}embed_tokens.weight"] = embedding.clone()
                tables[f"{prefix}shared_head.head.weight"] = head.clone()
        return tables

    def target(self) -> NamedTensors:
        for number in range(self.num_layers):
            prefix = f"{self.prefix}layers.{number}."
            dense = number < self.dense_layers
            counts = number == self.num_layers - 1
            yield from self.layer(prefix, dense, counts)
        yield f"{self.prefix}norm.weight", self.norm()

    def draft(self) -> NamedTensors:
        for prefix in self.mtp_prefixes:
            for name in ("enorm", "hnorm", "shared_head.norm"):
                yield f"{prefix}{name}.weight", self.norm()
            yield f"{prefix}eh_proj.weight", self.joining()
            yield from self.layer(prefix, dense=False, counts=False)

    def layer_sizes(self) -> dict[str, Any]:
        """Return the part of the configuration that describes the layers."""
        return {
            "num_hidden_layers": self.num_layers,
            "num_nextn_predict_layers": self.mtp_layers,
            "intermediate_size": self.hidden,
            "attention_bias": False,
        }

    def expert_sizes(self) -> dict[str, Any]:
        """Return the part of the configuration that describes mixtures of experts."""
        return {
            "first_k_dense_replace": self.dense_layers,
            # Of the shared expert too, which counts.
            "moe_intermediate_size": self.hidden,
            "n_shared_experts": 1,
            "n_routed_experts": NUM_EXPERTS,
            "num_experts_per_tok": EXPERTS_PER_TOKEN,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
        }

    def latent_attention_sizes(self) -> dict[str, Any]:
        """Return the part of the configuration that describes latent attention."""
        return {
            "num_attention_heads": NUM_HEADS,
            "num_key_value_heads": NUM_HEADS,
            "q_lora_rank": Q_LORA_RANK,
            "kv_lora_rank": KV_LORA_RANK,
            "qk_rope_head_dim": self.rope_head_dim,
            "qk_nope_head_dim": NOPE_HEAD_DIM,
            "v_head_dim": V_HEAD_DIM,
        }

    def latent_attention(self, prefix: str) -> NamedTensors:
        """Yield a multi-head latent attention.

        Args:
            prefix: Of the tensors' names.
        """
        # Rotated keys are the same for all heads and stored with the latent ones.
        latent = KV_LORA_RANK + self.rope_head_dim
        queries = NUM_HEADS * (NOPE_HEAD_DIM + self.rope_head_dim)
        keys_and_values = NUM_HEADS * (NOPE_HEAD_DIM + V_HEAD_DIM)
        values = NUM_HEADS * V_HEAD_DIM
        for name, (rows, columns), scale in (
            ("q_a_proj", (Q_LORA_RANK, self.hidden), 1.0),
            ("q_b_proj", (queries, Q_LORA_RANK), 1.0),
            ("kv_a_proj_with_mqa", (latent, self.hidden), 1.0),
            ("kv_b_proj", (keys_and_values, KV_LORA_RANK), 1.0),
            ("o_proj", (self.hidden, values), NOISE),
        ):
            yield f"{prefix}{name}.weight", self.matrix(rows, columns, scale)
        yield f"{prefix}q_a_layernorm.weight", self.norm(Q_LORA_RANK)
        yield f"{prefix}kv_a_layernorm.weight", self.norm(KV_LORA_RANK)

    def layer(self, prefix: str, dense: bool, counts: bool) -> NamedTensors:
        """Yield one decoder layer.

        Args:
            prefix: Of the tensors' names.
            dense: Whether it is no mixture of experts.
            counts: Whether it counts or is noise.
        """
        yield f"{prefix}input_layernorm.weight", self.norm()
        yield f"{prefix}post_attention_layernorm.weight", self.norm()
        yield from self.self_attention(f"{prefix}self_attn.")
        mlp = f"{prefix}mlp."
        if dense:
            yield from self.mlp(mlp, self.hidden, counts)
            return
        yield from self.mixture(mlp, "shared_experts", counts, self.hidden)
        # Favours no expert.
        yield f"{mlp}gate.e_score_correction_bias", torch.zeros(NUM_EXPERTS)
