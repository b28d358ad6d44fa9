# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Placeholders for the vocabulary modules a draft takes over from its target.

A draft that drafts with the target's `embed_tokens` and `lm_head` has no use for
tables of its own. It builds a placeholder in their stead, and the proposer puts the
target's module in its place once the draft has loaded.
"""

import gc
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import nn

from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator

logger = init_logger(__name__)

REMEDY = (
    "It takes a target that has this module, and a proposer that attaches the target's."
)
# Loaders that look up each tensor of a checkpoint in the draft's state.
_LOADED_AS_SAVED = {"runai_streamer_sharded", "sharded_state", "tensorizer"}


class UnattachedMethod:
    """Quantization method of what isn't attached yet: may be looked at, but not used.

    It is an object, and no property that raises, because the loaders ask every module
    for its `quant_method` before anything is attached.
    """

    def __init__(self, message: str) -> None:
        self.message = message

    def apply(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise RuntimeError(self.message)

    embedding = apply


class DeferredVocabModule(nn.Module):
    """A vocabulary module without parameters or buffers.

    Checkpoint tensors meant for it go by. Using it raises `RuntimeError`; asking
    for an attribute it doesn't have raises `AttributeError`, so that `hasattr` works.

    Args:
        args: Ignored: what the module it stands for takes.
        prefix: Full name of the module in the draft, for messages.
        kwargs: Ignored, like `args`.

    """

    name: str

    def __init__(self, *args: Any, prefix: str = "", **kwargs: Any) -> None:
        super().__init__()
        self.label = f"{prefix or self.name} ({type(self).__name__})"
        self.message = (
            f"{self.label} was used before the target's module was attached in its "
            f"place. {REMEDY}"
        )
        _placeholders.add(self)
        self.quant_method = UnattachedMethod(self.message)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            raise AttributeError(f"{error}: {self.__dict__.get('message')}") from None

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise RuntimeError(self.message)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        for _ in weights:
            pass
        return set()


# Of this process. One that was replaced is freed with the draft's reference to it.
_placeholders: WeakSet[DeferredVocabModule] = WeakSet()


class DeferredVocabEmbedding(DeferredVocabModule):
    """Stands for a `VocabParallelEmbedding` until the target's is attached."""

    name = "embed_tokens"


class DeferredLMHead(DeferredVocabModule):
    """Stands for a `ParallelLMHead` until the target's is attached."""

    name = "lm_head"

    @property
    def tp_size(self) -> int:
        # LogitsProcessor.get_top_tokens reads this before anything else.
        raise RuntimeError(self.message)

    def tie_weights(self, embed_tokens: nn.Module) -> "DeferredLMHead":
        return self


def defers_vocab(pp_group: "GroupCoordinator") -> bool:
    """Return whether a draft leaves its vocabulary modules to the target.

    Args:
        pp_group: The pipeline-parallel group, from the draft's own module.

    """
    # With more stages the proposer leaves the draft's embedding alone.
    return pp_group.world_size == 1 and not _is_loaded_as_saved()


def _is_loaded_as_saved() -> bool:
    vllm_config = get_current_vllm_config_or_none()
    if vllm_config is None:
        return False
    draft = vllm_config.speculative_config
    load_config = draft and draft.draft_load_config or vllm_config.load_config
    return load_config.load_format in _LOADED_AS_SAVED


def draft_embedding(
    embedding_class: type[nn.Module], pp_group: "GroupCoordinator"
) -> type[nn.Module]:
    """Return the class to build a draft's vocabulary embedding from.

    Args:
        embedding_class: What the draft uses where it needs a table of its own.
        pp_group: The pipeline-parallel group, from the draft's own module.

    """
    return DeferredVocabEmbedding if defers_vocab(pp_group) else embedding_class


def draft_lm_head(
    head_class: type[nn.Module], pp_group: "GroupCoordinator"
) -> type[nn.Module]:
    """Return the class to build a draft's LM head from.

    Args:
        head_class: What the draft uses where it needs a head of its own.
        pp_group: The pipeline-parallel group, from the draft's own module.

    """
    return DeferredLMHead if defers_vocab(pp_group) else head_class


def is_unallocated(module: Any) -> bool:
    """Return whether a module is a placeholder, or a table without storage."""
    return isinstance(module, DeferredVocabModule) or (
        isinstance(module, VocabParallelEmbedding)
        and any(parameter.is_meta for parameter in module.parameters())
    )


def deferred_modules(model: nn.Module) -> list[str]:
    """Return the names of the vocabulary modules that a draft left unallocated."""
    return [
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if is_unallocated(module)
    ]


def is_deferred(model: nn.Module, name: str) -> bool:
    """Return whether the vocabulary module of this name is a placeholder.

    Args:
        model: The draft.
        name: Attribute name of the module, e.g. `embed_tokens`.

    """
    return any(path.rpartition(".")[2] == name for path in deferred_modules(model))


def skip_deferred_weights(
    model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield checkpoint tensors, without those of vocabulary modules left unallocated.

    For loaders that look up a parameter for each tensor. Scales that lie beside a table
    go by with it. Once the target's modules are attached, everything is yielded.

    Args:
        model: The draft.
        weights: Names and tensors of a checkpoint that holds the draft.

    """
    deferred = {_table(path) for path in deferred_modules(model)}
    for name, tensor in weights:
        if _table(name.rpartition(".")[0]) not in deferred:
            yield name, tensor


def _table(path: str) -> str:
    # A `shared_head.head` is filled from a copy of its own, or from `lm_head`.
    name = path.rpartition(".")[2]
    return "lm_head" if name == "head" else name


def check_attached(model: nn.Module, deferred: Sequence[str]) -> None:
    """Check that the proposer attached a module in place of every placeholder.

    Args:
        model: The draft, after the proposer shared the target's modules with it.
        deferred: What `deferred_modules` returned before that.

    Raises:
        RuntimeError: A placeholder is left: the draft could not serve.

    """
    draft = type(model).__name__
    attached = {name: _submodule(model, name) for name in deferred}
    left = [name for name, module in attached.items() if _is_unusable(module)]
    left += [name for name in deferred_modules(model) if name not in left]
    if left:
        raise RuntimeError(
            f"{draft}: {', '.join(left)} was left unallocated for the target's module "
            f"to be attached in its place, and none was attached. {REMEDY}"
        )
    # Whoever holds on to one that was replaced has no use for it.
    _placeholders.clear()
    saved = {
        name: sum(p.nbytes for p in module.parameters()) / 2**20
        for name, module in attached.items()
    }
    if saved:
        logger.info(
            "%s: %.1f MiB not allocated on this rank (%s); the target's modules are "
            "attached.",
            draft,
            sum(saved.values()),
            ", ".join(f"{name} {mib:.1f} MiB" for name, mib in saved.items()),
        )


def check_none_left() -> None:
    """Check that no draft in this process has a placeholder left.

    For workers, once all is loaded: a platform's own proposer need not call
    `check_attached`.

    Raises:
        RuntimeError: A placeholder is left: a draft could not serve.

    """
    if not _placeholders:
        return
    gc.collect()
    if left := sorted(placeholder.label for placeholder in _placeholders):
        raise RuntimeError(
            f"{', '.join(left)}: left unallocated for the target's module to be "
            f"attached in its place, and none was attached. {REMEDY}"
        )


def _submodule(model: nn.Module, name: str) -> Any:
    return reduce(
        lambda module, part: getattr(module, part, None), name.split("."), model
    )


def _is_unusable(module: Any) -> bool:
    return is_unallocated(module) or not isinstance(module, nn.Module)
