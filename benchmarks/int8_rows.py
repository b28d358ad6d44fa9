# SPDX-License-Identifier: Apache-2.0
# mypy: allow-subclassing-any
"""An out-of-tree quantization of vLLM: vocabulary embeddings in int8.

Each row has a scale. Written as a plugin of its own, and imported by vLLM alone.
"""

from typing import Any

import torch
from torch import nn

from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.utils import set_weight_attrs

NAME = "int8_rows"


class Int8Rows(QuantizeMethodBase):
    """Keeps int8 rows, and multiplies those that are looked up by their scales."""

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        columns, [rows] = args[:2]
        loader = {"weight_loader": kwargs["weight_loader"], "output_dim": 0}
        for name, tensor in {
            "weight": torch.zeros(rows, columns, dtype=torch.int8),
            "weight_scale": torch.zeros(rows, 1, dtype=kwargs["params_dtype"]),
        }.items():
            parameter = nn.Parameter(tensor, requires_grad=False)
            set_weight_attrs(parameter, loader)
            layer.register_parameter(name, parameter)

    def embedding(self, layer: Any, ids: torch.Tensor) -> torch.Tensor:
        scale = layer.weight_scale[ids]
        rows: torch.Tensor = layer.weight[ids].to(scale.dtype) * scale
        return rows

    def apply(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError("not for LM heads")


class Int8RowsConfig(QuantizationConfig):
    """Quantizes the vocabulary embedding, and nothing else."""

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Int8RowsConfig":
        return cls()

    def get_quant_method(
        self, layer: nn.Module, prefix: str
    ) -> QuantizeMethodBase | None:
        if isinstance(layer, LinearBase):
            return UnquantizedLinearMethod()
        is_table = isinstance(layer, VocabParallelEmbedding)
        if is_table and not isinstance(layer, ParallelLMHead):
            return Int8Rows()
        return None


def register() -> None:
    """Make the quantization known to vLLM."""
    register_quantization_config(NAME)(Int8RowsConfig)
