# SPDX-License-Identifier: Apache-2.0
"""What families share whose target is a plain stack of decoder layers.

A layer is an attention and an MLP, each behind a norm. All layers but the first, dense
ones are mixtures of experts.
"""

from abc import abstractmethod
from typing import Any, ClassVar

import torch

from benchmarks.checkpoints.counting import (
    EXPERTS_PER_TOKEN,
    NUM_EXPERTS,
    CountingWeights,
    NamedTensors,
)


class DecoderWeights(CountingWeights):
    """The tensors and the configuration of one checkpoint.

    A subclass says which attention the layers have.

    Attributes:
        num_layers: Number of the target's layers.
        dense_layers: How many of them, the first ones, are no mixtures of experts.
        correction_bias: Name, within a mixture of experts, of the bias that corrects
            which experts are chosen.
        correction_shape: Its shape.
    """

    num_layers: ClassVar[int] = 2
    dense_layers: ClassVar[int] = 1
    correction_bias: ClassVar[str] = "gate.e_score_correction_bias"
    correction_shape: ClassVar[tuple[int, ...]] = (NUM_EXPERTS,)

    @abstractmethod
    def self_attention(self, prefix: str) -> NamedTensors:
        """Yield the attention of one layer; its tensors' names start with a prefix."""

    def target(self) -> NamedTensors:
        for number in range(self.num_layers):
            prefix = f"{self.prefix}layers.{number}."
            dense = number < self.dense_layers
            counts = number == self.num_layers - 1
            yield from self.layer(prefix, dense, counts)
        yield f"{self.prefix}norm.weight", self.norm()

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
        yield f"{mlp}{self.correction_bias}", torch.zeros(self.correction_shape)
