# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Leaves a draft's vocabulary tables unallocated where the target's are attached.

Who builds a draft announces which of the target's modules it is going to attach.
Vocabulary modules of the same size that are built meanwhile get their weights on the
`meta` device: shapes, attributes and weight loaders are in place, and loading into them
costs nothing. Once the draft stands, `settle_vocab` decides with it in hand: what is
attached stays as it is, anything else is given the weights it would have had.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import regex as re
import torch
from torch import nn

from vllm.distributed.parallel_state import get_pp_group
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.deferred_vocab import (
    REMEDY,
    UnattachedMethod,
    deferred_modules,
)
from vllm.model_executor.models.interfaces import supports_multimodal
from vllm.transformers_utils.config import get_safetensors_params_metadata

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.config.load import LoadConfig
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

# Loaders that build with `BaseModelLoader.create_model`, and fill a model tensor by
# tensor. The others share storage, or move what they find to a device.
_LOAD_FORMATS = {
    "auto",
    "dummy",
    "fastsafetensors",
    "hf",
    "instanttensor",
    "mistral",
    "npcache",
    "pt",
    "runai_streamer",
    "safetensors",
}
# Of these, whose tensors are those named in the checkpoint's safetensors headers.
_NAMED_IN_HEADERS = {"auto", "fastsafetensors", "hf", "instanttensor", "safetensors"}

# Per table: the flag of a draft that may have one of its own, where the target's is
# attached, and what names of tensors look like that may be meant for it.
_FLAGS = {"embed_tokens": "has_own_embed_tokens", "lm_head": "has_own_lm_head"}
_PLACES = {
    "embed_tokens": re.compile(r"model\.embed_tokens"),
    "lm_head": re.compile(r"lm_head|model\.layers\.[^.]+\.shared_head\.head"),
}
_TENSORS = {"embed_tokens": re.compile("emb|wte"), "lm_head": re.compile("head|output")}

_Size = tuple[int, int, int]


class _UnallocatedMethod(UnattachedMethod):
    """Quantization method of a table on `meta`: it has nothing to process."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        pass

    def tie_weights(self, layer: nn.Module, embed_tokens: nn.Module) -> nn.Module:
        return layer


class _Table:
    """A vocabulary module with its weights on `meta`, and how to give it real ones."""

    def __init__(self, layer: VocabParallelEmbedding, create: Callable[[], None]):
        self.layer = layer
        self.create = create
        self.device = torch.get_default_device()
        with torch.device("meta"):
            create()
        self.weights = dict(layer.named_parameters(recurse=False))

    def materialize(self, model: nn.Module) -> None:
        """Create the weights anew, for all modules that they were tied to."""
        layer = self.layer
        current = dict(layer.named_parameters(recurse=False))
        with self.device:
            self.create()
        layer.update_param_tp_status()
        created = dict(layer.named_parameters(recurse=False))
        for name, parameter in current.items():
            setattr(layer, name, parameter)
        successors = {}
        for name, weight in self.weights.items():
            for key, value in vars(weight).items():
                created[name].__dict__.setdefault(key, value)
            successors[weight] = created[name]
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter in successors:
                    setattr(module, name, successors[parameter])


class _Announcement:
    """What will be attached to the draft that is being built.

    Args:
        sizes: Sizes of the target's modules.
        load_config: How the draft is loaded.

    """

    def __init__(self, sizes: dict[str, _Size], load_config: "LoadConfig") -> None:
        self.sizes = sizes
        self.load_config = load_config
        self.tables: list[_Table] = []
        self.model: nn.Module | None = None

    def covers(self, layer: VocabParallelEmbedding) -> bool:
        table = "lm_head" if isinstance(layer, ParallelLMHead) else "embed_tokens"
        return (
            self.sizes.get(table) == _size(layer)
            # Online quantization allocates what it finds there.
            and not getattr(layer.quant_method, "uses_meta_device", False)
        )

    def create_weights(self, layer: VocabParallelEmbedding, *args, **kwargs) -> None:
        create = partial(layer.quant_method.create_weights, layer, *args, **kwargs)
        self.tables.append(_Table(layer, create))

    def settle(self, model: nn.Module, model_config: "ModelConfig") -> None:
        if not self.tables:
            return
        read_names = cache(
            partial(
                get_safetensors_params_metadata,
                model_config.model,
                revision=model_config.revision,
            )
        )
        attached = [
            _PLACES[table]
            for table in self.sizes
            if self._will_be_attached(table, model, read_names)
        ]
        users: dict[nn.Parameter, list[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            for parameter in module.parameters(recurse=False):
                users.setdefault(parameter, []).append(path)
        for table in self.tables:
            paths = [p for w in table.weights.values() for p in users.get(w, ())]
            if not all(any(place.fullmatch(p) for place in attached) for p in paths):
                table.materialize(model)
        for path in deferred_modules(model):
            module = model.get_submodule(path)
            if isinstance(module, VocabParallelEmbedding):
                message = f"{path} was used before the target's was attached. {REMEDY}"
                module.quant_method = _UnallocatedMethod(message)
        self.model = model
        self._leave_unread(model)

    def _will_be_attached(
        self, table: str, model: nn.Module, read_names: Callable[[], Collection[str]]
    ) -> bool:
        flag = _FLAGS[table]
        own = getattr(model, flag, None)
        if own or getattr(getattr(model, "config", None), flag, False):
            return False
        if own is None:
            return True
        # Loading sets the flag if there is such a tensor.
        if self.load_config.load_format == "dummy":
            return True
        if self.load_config.load_format not in _NAMED_IN_HEADERS:
            return False
        names = read_names()
        return bool(names) and not any(map(_TENSORS[table].search, names))

    def _leave_unread(self, model: nn.Module) -> None:
        """Have files skipped that hold nothing but tables left unallocated.

        A draft that may have tables of its own may also insist on their tensors, and so
        does a loader that was told to track a quantized model's.
        """
        if any(hasattr(model, flag) for flag in _FLAGS.values()):
            return
        if self.load_config.model_loader_extra_config.get("enable_weights_track"):
            return
        paths = {path for path, _ in model.named_modules(remove_duplicate=False)}
        deferred = set(deferred_modules(model))
        unread = set(map(_table_of, deferred)) - set(map(_table_of, paths - deferred))
        stock = getattr(model, "is_unused_checkpoint_weight", lambda name: False)
        model.is_unused_checkpoint_weight = lambda name: (
            stock(name) or _table_of(name.rpartition(".")[0]) in unread
        )

    def end(self) -> None:
        """Check the draft, which has been loaded meanwhile."""
        if self.model is None:
            return
        # Later weights are for the target's modules.
        self.model.__dict__.pop("is_unused_checkpoint_weight", None)
        for path in deferred_modules(self.model):
            if getattr(self.model, _FLAGS.get(_table_of(path) or "", ""), False):
                raise RuntimeError(
                    f"{type(self.model).__name__}: the checkpoint has {path}, which "
                    f"the names of its tensors didn't tell. {REMEDY}"
                )


def _table_of(path: str) -> str | None:
    """Return which table a module's path is for, None for other modules."""
    match = re.fullmatch(r"(?:.*\.)?(?:(embed_tokens)|lm_head|shared_head\.head)", path)
    return match and (match[1] or "lm_head")


_announced: ContextVar[_Announcement | None] = ContextVar("announced", default=None)


def _size(module: Any) -> _Size | None:
    """Return the size of a vocabulary module, None for anything else."""
    module = getattr(module, "base_layer", module)  # of a LoRA adapter
    if not isinstance(module, VocabParallelEmbedding):
        return None
    return module.num_embeddings, module.embedding_dim, module.tp_size


@contextmanager
def announce(
    embed_tokens: nn.Module | None,
    lm_head: nn.Module | None,
    vllm_config: "VllmConfig",
) -> Iterator[None]:
    """Announce the target's modules that a draft built meanwhile will be given.

    Args:
        embed_tokens: The target's embedding, if it is attached.
        lm_head: The target's LM head, if it is attached.
        vllm_config: Config that the draft is built with.

    """
    modules = {"embed_tokens": embed_tokens, "lm_head": lm_head}
    sizes = {
        table: size
        for table, module in modules.items()
        if (size := _size(module)) is not None
    }
    announcement = None
    # With more stages, the draft's embedding is left alone.
    speculative_config = vllm_config.speculative_config
    if sizes and speculative_config and get_pp_group().world_size == 1:
        load_config = speculative_config.draft_load_config or vllm_config.load_config
        if load_config.load_format in _LOAD_FORMATS:
            announcement = _Announcement(sizes, load_config)
    token = _announced.set(announcement)
    try:
        yield
    finally:
        _announced.reset(token)
    if announcement is not None:
        announcement.end()


@contextmanager
def announce_from_proposer(
    proposer: "SpecDecodeBaseProposer", target_model: nn.Module
) -> Iterator[None]:
    """Announce what a proposer of the legacy model runner is going to attach.

    Args:
        proposer: The proposer; it builds the draft meanwhile.
        target_model: The target.

    """
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    kind, base = type(proposer), SpecDecodeBaseProposer
    target: Any = target_model
    if supports_multimodal(target_model):
        target = target_model.get_language_model()
    embed_tokens = lm_head = None
    # One from elsewhere may do as it likes with what it is given.
    if kind.__module__.startswith("vllm.") and kind._get_model is base._get_model:
        if kind._maybe_share_embeddings is base._maybe_share_embeddings:
            embed_tokens = _embedding(target)
        if kind._maybe_share_lm_head is base._maybe_share_lm_head:
            lm_head = getattr(target, "lm_head", None)
    with announce(embed_tokens, lm_head, proposer.vllm_config):
        yield


@contextmanager
def announce_target(
    target_model: nn.Module, vllm_config: "VllmConfig"
) -> Iterator[None]:
    """Announce the modules of a target that the V2 model runner attaches.

    Args:
        target_model: The target.
        vllm_config: Config that the draft is built with.

    """
    target: Any = target_model
    if hasattr(target, "get_language_model"):
        target = target.get_language_model()
    lm_head = getattr(target, "lm_head", None) or getattr(target_model, "lm_head", None)
    with announce(_embedding(target), lm_head, vllm_config):
        yield


def _embedding(target: Any) -> nn.Module | None:
    inner = getattr(target, "model", target)
    for name in ("embed_tokens", "embedding"):
        if (module := getattr(inner, name, None)) is not None:
            return module
    return None


def weights_factory(layer: VocabParallelEmbedding) -> Callable[..., None]:
    """Return what creates the weights of a vocabulary module.

    Args:
        layer: The module, with its sizes and its quantization method.

    """
    announcement = _announced.get()
    if announcement is None or not announcement.covers(layer):
        return layer.quant_method.create_weights
    return announcement.create_weights


def settle_vocab(model: nn.Module, model_config: "ModelConfig") -> None:
    """Allocate tables that were left out of a model and will not be attached.

    Args:
        model: The model, before its weights are loaded.
        model_config: Its config.

    """
    announcement = _announced.get()
    if announcement is not None:
        announcement.settle(model, model_config)
