# SPDX-License-Identifier: Apache-2.0
"""What families share whose checkpoints are laid out like DeepSeek-V3's.

The MTP layers are stored as layers behind the target's last one, each with copies
of the target's vocabulary tables.
"""

from typing import Any, ClassVar

import torch

from benchmarks.checkpoints.counting import NOISE, NUM_HEADS, NamedTensors
from benchmarks.checkpoints.decoder import DecoderWeights

# Multi-head latent attention. The CPU kernels are compiled for these sizes.
KV_LORA_RANK = 512
ROPE_HEAD_DIM = 64
NOPE_HEAD_DIM = 128
V_HEAD_DIM = 128
# Free to choose.
Q_LORA_RANK = 128


class NextnWeights(DecoderWeights):
    """The tensors and the configuration of one checkpoint.

    A subclass says which attention the layers have.

    Attributes:
        rope_head_dim: Size of the part of a query or key of the latent attention that
            depends on the position.
    """

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

    def tables(self) -> dict[str, torch.Tensor]:
        tables = super().tables()
        if self.mtp_tables:
            embedding, head = tables.values()
            for prefix in self.mtp_prefixes:
                # One file can't have two names for the same memory.
                tables[f"{prefix}embed_tokens.weight"] = embedding.clone()
                tables[f"{prefix}shared_head.head.weight"] = head.clone()
        return tables

    def draft(self) -> NamedTensors:
        for prefix in self.mtp_prefixes:
            for name in ("enorm", "hnorm", "shared_head.norm"):
                yield f"{prefix}{name}.weight", self.norm()
            yield f"{prefix}eh_proj.weight", self.joining()
            yield from self.layer(prefix, dense=False, counts=False)

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
