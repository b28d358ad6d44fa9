# SPDX-License-Identifier: Apache-2.0
"""Builds the draft that vLLM would, without weights, and says which tables it has.

`python -m vllm_lean_vocab.build_draft ANSWER` reads a `Request` as JSON from standard
input and writes to the file `ANSWER` what `build` returns, or `{"error": SENTENCE}`.
It needs a process of its own, because it gives this one a rank and stops vLLM's loader.

vLLM does all of it: its config code picks the class, its proposer or draft loader
builds it, with this package's plugin as always. Only then, before any weight is read,
is it stopped. Nothing is written to what it allocated on the host, so that no memory is
taken for it, and a GPU is left alone.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_lean_vocab.child import respond

if TYPE_CHECKING:
    from torch import nn

# Parts of a tensor's name that tell a vocabulary table.
EMBEDDINGS = {"embed_tokens", "tok_embeddings", "word_embeddings", "wte"}
HEADS = {"lm_head", "head", "output"}


class Request(NamedTuple):
    """What to build.

    Attributes:
        model: Directory of the target.
        speculative_config: As for `vllm serve`.
        tensor_parallel_size: Number of ranks that share each table.
        pipeline_parallel_size: Number of stages; the last one has the draft.
        trust_remote_code: As for `vllm serve`.

    """

    model: str
    speculative_config: Mapping[str, Any]
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    trust_remote_code: bool = False


class CantBuild(Exception):
    """vLLM builds no such draft; says why in one sentence."""


class _Built(BaseException):
    """Leaves vLLM's loader with the draft, past everything that handles errors."""

    def __init__(self, draft: "nn.Module") -> None:
        super().__init__()
        self.draft = draft


def build(request: Request) -> dict[str, Any]:
    """Build a draft and describe its vocabulary tables.

    Relies on `EngineArgs.create_engine_config`; see `describe`, too.

    Args:
        request: What to build.

    Returns:
        What `describe` does.

    Raises:
        CantBuild: vLLM has no such draft, or there is nothing to build.

    """
    from vllm.config import set_current_vllm_config

    config = _engine_config(request)
    with set_current_vllm_config(config):
        _take_rank(request.tensor_parallel_size, request.pipeline_parallel_size)
        return describe(config)


def describe(config: Any) -> dict[str, Any]:
    """Build the draft of a config, in this process, and describe its tables.

    Relies on `BaseModelLoader.create_model`, and on `SpecDecodeBaseProposer.load_model`
    or the V2 model runner's draft loaders.

    Args:
        config: A `VllmConfig` with a speculative config; it is the current one.

    Returns:
        Ready for `json.dump`: `vllm` (version), `draft` (class), `runner` (`legacy` or
        `v2`), `pull_requests` (ids of those that are on), `target_shape` (rows and
        columns of the target's tables), `checkpoint` (whether there are weights to
        look into), and `tables`, by path: `deferred`; `own` (whether the draft says
        that it keeps the table: None if it has no say, False if loading might change
        it); `tensors` (names in the draft's part of the checkpoint that look like it);
        and of what is no placeholder `shape` (rows and columns over all ranks),
        `dtype`, and `bytes` on this rank.

    Raises:
        CantBuild: The draft isn't one that is given tables of its target.

    """
    import vllm
    from vllm_lean_vocab import plugin

    load = _loader(config)
    target, shape = _target(config.model_config)
    draft = _stop_when_built(load, target, config)
    names = _draft_tensors(config.speculative_config)
    return {
        "vllm": vllm.__version__,
        "draft": type(draft).__name__,
        "runner": "v2" if _is_v2(config) else "legacy",
        "pull_requests": list(plugin.in_use()),
        "target_shape": shape,
        "checkpoint": names is not None,
        "tables": _tables(draft, names or []),
    }


def _engine_config(request: Request) -> Any:
    """Return vLLM's config, made for loading on the host."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        request.model,
        speculative_config=dict(request.speculative_config),
        tensor_parallel_size=request.tensor_parallel_size,
        pipeline_parallel_size=request.pipeline_parallel_size,
        trust_remote_code=request.trust_remote_code,
        # Named, it isn't chosen by how many GPUs there are.
        distributed_executor_backend="mp",
        skip_tokenizer_init=True,
        enforce_eager=True,
    )
    method = request.speculative_config.get("method")
    try:
        config = arguments.create_engine_config()
    except ZeroDivisionError as error:
        # It divides by their number.
        raise CantBuild("its config says that it has no MTP layers") from error
    except NotImplementedError as error:
        raise CantBuild(f"no draft of the method {method!r} for it: {error}") from error
    for load_config in (
        config.load_config,
        getattr(config.speculative_config, "draft_load_config", None),
    ):
        if load_config is not None:
            load_config.device = "cpu"
    return config


def _take_rank(tensor_parallel_size: int, pipeline_parallel_size: int) -> None:
    """Make this process the first tensor-parallel rank of the last stage.

    Building asks the groups for sizes and ranks; nothing is sent through them.
    """
    from vllm.distributed import parallel_state

    any_port = "tcp://127.0.0.1:0"
    parallel_state.init_distributed_environment(1, 0, any_port, 0, "gloo")
    parallel_state.initialize_model_parallel()
    for group, size, rank in (
        (parallel_state.get_tp_group(), tensor_parallel_size, 0),
        (
            parallel_state.get_pp_group(),
            pipeline_parallel_size,
            pipeline_parallel_size - 1,
        ),
    ):
        group.ranks, group.world_size = list(range(size)), size
        group.rank = group.rank_in_group = rank


def _target(model_config: Any) -> tuple["nn.Module", tuple[int, int]]:
    """Return the target, as far as drafts are given something of it, and its size."""
    import torch
    from torch import nn

    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    size = model_config.get_vocab_size(), model_config.get_hidden_size()
    options = {"params_dtype": model_config.dtype}
    target = nn.Module()
    target.config = model_config.hf_config
    target.model = nn.Module()
    with torch.device("meta"):
        target.model.embed_tokens = VocabParallelEmbedding(*size, **options)
        target.lm_head = ParallelLMHead(*size, **options)
    return target, size


def _loader(config: Any) -> Callable[["nn.Module", Any], Any]:
    """Return what loads the draft in the model runner that the config is for.

    Raises:
        CantBuild: The method has no draft that is given the target's tables.

    """
    speculative = config.speculative_config
    if speculative.method not in ("dflash", "dspark") and not speculative.use_eagle():
        raise CantBuild(
            f"with the method {speculative.method!r} no draft is given the target's "
            "tables"
        )
    return _load_v2 if _is_v2(config) else _load_legacy


def _is_v2(config: Any) -> bool:
    return bool(getattr(config, "use_v2_model_runner", False))


def _load_legacy(target: "nn.Module", config: Any) -> None:
    import torch

    from vllm.v1.spec_decode import dflash, eagle

    speculative = config.speculative_config
    kind: Any = eagle.EagleProposer
    if getattr(speculative, "use_gemma4_mtp", bool)():
        from vllm.v1.spec_decode import gemma4

        kind = gemma4.Gemma4Proposer
    elif getattr(speculative, "use_step3p5_mtp", bool)():
        from vllm.v1.spec_decode import step3p5

        kind = step3p5.Step3p5MTPProposer
    elif speculative.method == "dflash":
        kind = dflash.DFlashProposer
    # It is never used, so its buffers need no storage.
    kind(config, torch.device("meta")).load_model(target)


def _load_v2(target: "nn.Module", config: Any) -> None:
    from vllm.v1.worker.gpu.spec_decode.eagle.utils import load_eagle_model as load

    speculative = config.speculative_config
    if speculative.method == "dflash":
        from vllm.v1.worker.gpu.spec_decode.dflash.utils import load_dflash_model

        load = load_dflash_model
    elif speculative.method == "dspark":
        from vllm.v1.worker.gpu.spec_decode.dspark.utils import load_dspark_model

        load = load_dspark_model
    elif getattr(speculative, "use_gemma4_mtp", bool)():
        from vllm.v1.worker.gpu.spec_decode.gemma4.speculator import Gemma4Speculator

        speculator: Any = object.__new__(Gemma4Speculator)
        speculator.vllm_config = config
        speculator.speculative_config = speculative
        speculator.load_draft_model(target, set())
        return
    load(target, config)


def _stop_when_built(
    load: Callable[["nn.Module", Any], Any], target: "nn.Module", config: Any
) -> "nn.Module":
    """Return the draft that vLLM has built, before it reads weights."""
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    create_model = BaseModelLoader.create_model

    def create_and_stop(*args: Any, **kwargs: Any) -> Any:
        raise _Built(create_model(*args, **kwargs))

    BaseModelLoader.create_model = create_and_stop
    try:
        load(target, config)
    except _Built as built:
        return built.draft
    finally:
        BaseModelLoader.create_model = create_model
    raise CantBuild("vLLM loads it in a way that isn't known here")


def _tables(draft: "nn.Module", names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Describe the vocabulary modules of a draft."""
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    try:
        from vllm.model_executor.models import deferred_vocab
    except ImportError:  # no pull request is on
        deferred: set[str] = set()
    else:
        deferred = set(deferred_vocab.deferred_modules(draft))
    config = getattr(draft, "config", None)
    tables = {}
    for path, module in draft.named_modules(remove_duplicate=False):
        if path not in deferred and not isinstance(module, VocabParallelEmbedding):
            continue
        is_head = isinstance(module, ParallelLMHead) or path.endswith("head")
        flag = "has_own_lm_head" if is_head else "has_own_embed_tokens"
        kind = HEADS if is_head else EMBEDDINGS
        tables[path] = {
            "deferred": path in deferred,
            "own": getattr(config, flag, False) or getattr(draft, flag, None),
            "tensors": [
                name
                for name in names
                if kind & set(name.split(".")) and _layer(path) in ("", _layer(name))
            ],
        }
        if isinstance(module, VocabParallelEmbedding):
            parameters = list(module.parameters(recurse=False))
            largest = max(parameters, key=lambda parameter: parameter.nbytes)
            tables[path] |= {
                "shape": (module.num_embeddings, module.embedding_dim),
                "dtype": str(largest.dtype).removeprefix("torch."),
                "bytes": sum(parameter.nbytes for parameter in parameters),
            }
    return tables


def _layer(name: str) -> str:
    """Return the number of the layer that a name is in, if it is in one."""
    parts = name.split(".")
    return parts[parts.index("layers") + 1] if "layers" in parts[:-1] else ""


def _draft_tensors(speculative_config: Any) -> list[str] | None:
    """Return the names of the draft's tensors, None where no weights are to be found.

    A native draft lies in the target's checkpoint: as `mtp`, or behind its last layer.
    """
    from vllm.transformers_utils.config import get_safetensors_params_metadata

    draft, target = (
        speculative_config.draft_model_config,
        speculative_config.target_model_config,
    )
    names = list(get_safetensors_params_metadata(draft.model, revision=draft.revision))
    if not names:
        return None
    if draft.model != target.model:
        return names
    layers = target.hf_text_config.num_hidden_layers
    return [
        name
        for name in names
        if any(part.startswith("mtp") for part in name.split("."))
        or int(_layer(name) or 0) >= layers
    ]


def _why(error: Exception) -> str:
    if isinstance(error, CantBuild):
        return str(error)
    return f"vLLM refuses: {_sentence(error)}"


def _sentence(error: BaseException) -> str:
    """Return the first sentence of what an error says."""
    text = str(error)
    if callable(errors := getattr(error, "errors", None)):  # pydantic's
        text = "; ".join(each["msg"].removeprefix("Value error, ") for each in errors())
    first = " ".join(text.split()).partition(". ")[0].rstrip(".")
    if type(error).__module__ == "builtins" and not isinstance(error, ValueError):
        return f"{type(error).__name__}: {first}".removesuffix(": ")
    return first or type(error).__name__


def main() -> None:
    """Answer one request."""
    request = Request(**json.load(sys.stdin))
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    respond(lambda: build(request), _why)


if __name__ == "__main__":
    main()
