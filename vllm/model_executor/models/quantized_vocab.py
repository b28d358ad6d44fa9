# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Vocabulary embeddings whose table may be quantized."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
    method_has_implemented_embedding,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)
from vllm.transformers_utils.config import get_safetensors_params_metadata

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

# They share `weight`, and nothing that it takes to read a quantized one.
_SHARE_ONLY_THE_WEIGHT = (
    QuantizeMethodBase.tie_weights,
    UnquantizedEmbeddingMethod.tie_weights,
)


class EmbeddingQuantConfig:
    """A quantization config, as far as an embedding asks it.

    A config that has no method to look up rows of a table with, that refuses the table,
    or that wants it in a format which the checkpoint doesn't have it in, leaves it
    unquantized, as it was before embeddings asked.

    Args:
        quant_config: The model's config.

    """

    # For linear layers and experts only.
    online_quantization_config = None

    def __init__(self, quant_config: QuantizationConfig) -> None:
        self.quant_config = quant_config

    def get_quant_method(
        self, layer: nn.Module, prefix: str
    ) -> QuantizeMethodBase | None:
        try:
            method = self.quant_config.get_quant_method(layer, prefix)
        except (NotImplementedError, ValueError) as error:
            reason = str(error)
        else:
            if method is None or isinstance(method, UnquantizedLinearMethod):
                return None  # some say the latter of what they leave out
            if not method_has_implemented_embedding(type(method)):
                reason = f"{type(method).__name__} can't look up rows of it"
            elif not _takes_plain_rows(method, layer) and _checkpoint_has_plain_rows():
                reason = "so it is in the checkpoint"
            else:
                return method
        logger.warning(
            "%s stays unquantized (%s): %s",
            prefix,
            self.quant_config.get_name(),
            reason,
        )
        return None


def _takes_plain_rows(method: QuantizeMethodBase, layer: nn.Module) -> bool:
    """Return whether a method's parameters include the rows as they are."""
    probe = nn.Module()
    try:
        with torch.device("meta"):
            method.create_weights(
                probe,
                layer.embedding_dim,
                [layer.num_embeddings_padded],
                layer.embedding_dim,
                layer.num_embeddings_padded,
                params_dtype=torch.get_default_dtype(),
                weight_loader=layer.weight_loader,
            )
    except Exception:  # it wants more of a layer than the probe has
        return True
    return hasattr(probe, "weight")


def _checkpoint_has_plain_rows() -> bool:
    model_config = get_current_vllm_config().model_config
    if model_config is None:
        return False
    tensors = get_safetensors_params_metadata(
        model_config.model, revision=model_config.revision
    )
    dtypes = {
        info.get("dtype")
        for name, info in tensors.items()
        if name.endswith("embed_tokens.weight")
    }
    return bool(dtypes) and dtypes <= {"BF16", "F16", "F32"}


def for_embedding(
    quant_config: QuantizationConfig | None,
) -> EmbeddingQuantConfig | None:
    """Return what to build a vocabulary embedding with.

    Args:
        quant_config: The model's config.

    """
    return None if quant_config is None else EmbeddingQuantConfig(quant_config)


def target_embedding_name(vllm_config: "VllmConfig") -> str:
    """Return the full name that a draft's target has for its embedding.

    Both tables are filled from one tensor of the checkpoint, and the quantization
    config knows that by the target's name.

    Args:
        vllm_config: Config that the draft is built with.

    """
    speculative_config = vllm_config.speculative_config
    # Where the draft is built alone, its own config is all there is.
    config = (
        vllm_config.model_config
        if speculative_config is None
        else speculative_config.target_model_config
    )
    if config.architecture.endswith("ForConditionalGeneration"):
        return "language_model.model.embed_tokens"
    return "model.embed_tokens"


def tie_lm_head(lm_head: nn.Module, embed_tokens: nn.Module) -> nn.Module:
    """Tie an LM head to an embedding whose table may be quantized.

    Args:
        lm_head: The head.
        embed_tokens: The embedding.

    Returns:
        The head, or the embedding in its place, as the head's method has it.

    Raises:
        ValueError: The head can't use the format of the table.

    """
    method = lm_head.quant_method
    if (
        isinstance(lm_head, ParallelLMHead)
        and not isinstance(embed_tokens.quant_method, UnquantizedEmbeddingMethod)
        and type(method).tie_weights in _SHARE_ONLY_THE_WEIGHT
    ):
        head = getattr(lm_head, "prefix", "lm_head")
        table = getattr(embed_tokens, "prefix", "embed_tokens")
        raise ValueError(
            f"{head} is tied to {table}, but "
            f"{type(method).__name__} can't use its quantized table "
            f"({type(embed_tokens.quant_method).__name__}). Leave the embedding out of "
            "the quantization, or use a checkpoint with an LM head of its own."
        )
    return lm_head.tie_weights(embed_tokens)
