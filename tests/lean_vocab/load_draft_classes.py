# SPDX-License-Identifier: Apache-2.0
"""Builds drafts, loads them and attaches a target's vocabulary tables to them.

Run as a file, with a file of jobs: a JSON list of objects with `model`, a directory
with the target's `config.json`; `speculative_config`; `load_format`; `loader`, one of
`LOADERS`; and, for what can't be had on a CPU, `stand_ins`, names of what is replaced
with `NoParameters`, `modules`, which can't be imported, and `classes`, vLLM's for
another platform by the architecture that they are registered as. Prints one JSON list
as its last line: for each job what was loaded, or the `error` that it ended in.

The draft is built by its class and loaded by vLLM's own loaders. The target is nothing
but the two tables: no more of it is looked at.
"""

import contextlib
import gc
import importlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn


def load_legacy(target: nn.Module, config: Any) -> nn.Module:
    """Load a draft as the legacy model runner does."""
    from vllm.v1.spec_decode.dflash import DFlashProposer
    from vllm.v1.spec_decode.eagle import EagleProposer
    from vllm.v1.spec_decode.gemma4 import Gemma4Proposer
    from vllm.v1.spec_decode.medusa import MedusaProposer
    from vllm.v1.spec_decode.step3p5 import Step3p5MTPProposer

    speculative: Any = config.speculative_config
    if speculative.method == "medusa":
        proposer: Any = MedusaProposer(config, torch.device("cpu"))
    elif speculative.method == "dflash":
        proposer = DFlashProposer(config, torch.device("cpu"))
    elif speculative.use_gemma4_mtp():
        proposer = Gemma4Proposer(config, torch.device("cpu"))
    elif speculative.use_step3p5_mtp():
        proposer = Step3p5MTPProposer(config, torch.device("cpu"))
    else:
        proposer = EagleProposer(config, torch.device("cpu"))
    proposer.load_model(target)
    return proposer.model


def load_gemma4(target: nn.Module, config: Any) -> nn.Module:
    """Load a draft as the V2 runner does with Gemma4's, whose loader needs a GPU."""
    from vllm.v1.worker.gpu.spec_decode.gemma4.speculator import Gemma4Speculator

    speculator = object.__new__(Gemma4Speculator)
    speculator.vllm_config = config
    speculator.speculative_config = config.speculative_config
    with mock.patch.object(Gemma4Speculator, "_setup_gemma4_kv_sharing"):
        return speculator.load_draft_model(target, set())


def load_v2(target: nn.Module, config: Any) -> nn.Module:
    from vllm.v1.worker.gpu.spec_decode.eagle.utils import load_eagle_model

    return load_eagle_model(target, config)


def load_dflash(target: nn.Module, config: Any) -> nn.Module:
    from vllm.v1.worker.gpu.spec_decode.dflash.utils import load_dflash_model

    return load_dflash_model(target, config)


def load_dspark(target: nn.Module, config: Any) -> nn.Module:
    from vllm.v1.worker.gpu.spec_decode.dspark.utils import load_dspark_model

    return load_dspark_model(target, config)


LOADERS: dict[str, Callable[[nn.Module, Any], nn.Module]] = {
    "legacy": load_legacy,
    "v2": load_v2,
    "gemma4": load_gemma4,
    "dflash": load_dflash,
    "dspark": load_dspark,
}


class NoParameters(nn.Module):
    """Stands in for an innermost part that has no parameters, and none for a CPU."""

    def __init__(self, *args: Any, prefix: str = "", **kwargs: Any) -> None:
        super().__init__()
        self.layer_name = prefix

    def forward(self, *args: Any, **kwargs: Any) -> "NoParameters":
        return self  # of a function that chooses a class, too


@contextlib.contextmanager
def model_runner(loader: str) -> Iterator[None]:
    """Have options checked for the model runner that a loader belongs to."""
    from vllm.config import vllm as module

    version = {"VLLM_USE_V2_MODEL_RUNNER": str(int(loader != "legacy"))}
    with (
        mock.patch.dict(os.environ, version),
        mock.patch.object(module, "HAS_TRITON", True),
    ):
        yield


@contextlib.contextmanager
def stand_ins(names: list[str]) -> Iterator[None]:
    """Put `NoParameters` in place of what a CPU lacks."""
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch(name, NoParameters))
        yield


def target_tables(config: Any) -> nn.Module:
    """Return the target's embedding and LM head, with their usual names."""
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    model_config = config.model_config
    size = model_config.get_vocab_size(), model_config.get_hidden_size()
    target = nn.Module()
    target.config = model_config.hf_config
    target.model = nn.Module()
    dtype = model_config.dtype
    target.model.embed_tokens = VocabParallelEmbedding(*size, params_dtype=dtype)
    target.lm_head = ParallelLMHead(*size, params_dtype=dtype)
    for value, parameter in enumerate(target.parameters()):
        parameter.data.fill_(value + 1)
    return target


def vocabulary(model: nn.Module, rows: int) -> dict[str, nn.Module]:
    """Return by path all modules that are tables with a row per token."""
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        VocabParallelEmbedding,
    )

    return {
        path: module
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, VocabParallelEmbedding)
        or (isinstance(module, nn.Embedding) and module.num_embeddings >= rows)
    }


def describe(module: nn.Module) -> dict[str, Any]:
    """Return a module's size in bytes, and the value that all of its elements have."""
    parameters = [p for p in module.parameters(recurse=False) if not p.is_meta]
    values = {float(v) for p in parameters[:1] for v in p.detach().aminmax()}
    return {
        "nbytes": sum(p.nbytes for p in parameters),
        "value": values.pop() if len(values) == 1 else None,
    }


def load(config: Any, loader: str) -> dict[str, Any]:
    """Load a draft and report on it."""
    from load_draft import AllocationRecorder

    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    target = target_tables(config)
    tables = {"embed_tokens": target.model.embed_tokens, "lm_head": target.lm_head}
    table_bytes = tables["embed_tokens"].weight.nbytes
    rows = config.model_config.get_vocab_size() // 4
    built: dict[str, Any] = {}
    load_model = BaseModelLoader.load_model

    def recording(*args: Any, **kwargs: Any) -> nn.Module:
        with AllocationRecorder() as recorder:
            draft = load_model(*args, **kwargs)
        built["allocated"] = sum(n for n in recorder.sizes if n >= table_bytes)
        built["largest_other"] = max(n for n in recorder.sizes if n < table_bytes)
        built["tables"] = {p: describe(m) for p, m in vocabulary(draft, rows).items()}
        return draft

    with mock.patch.object(BaseModelLoader, "load_model", recording):
        draft = LOADERS[loader](target, config)
    names = {module: name for name, module in tables.items()}
    final = vocabulary(draft, rows)
    return {
        "draft": type(draft).__name__,
        "built": built,
        "target's": {p: names[m] for p, m in final.items() if m in names},
        "own": {p: describe(m) for p, m in final.items() if m not in names},
        "meta": [
            name
            for name, tensor in (*draft.named_parameters(), *draft.named_buffers())
            if tensor.is_meta
        ],
    }


def estimate(config: Any) -> dict[str, Any]:
    """Return what is said of a draft without loading it."""
    from vllm_lean_vocab.build_draft import CantBuild, describe

    on_the_host = config.load_config.device
    config.load_config.device = "cpu"
    try:
        return describe(config)
    except CantBuild as error:
        return {"error": str(error)}
    finally:
        config.load_config.device = on_the_host
        # Layers of one name may be built once.
        config.compilation_config.static_forward_context.clear()


def know_model_types(*paths: str) -> None:
    """Have configurations read for which checkpoints bring a class of their own."""
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    def init(self: Any, text_config: Any = None, **kwargs: Any) -> None:
        PretrainedConfig.__init__(self, **kwargs)
        if text_config is not None:
            self.text_config = AutoConfig.for_model(**text_config)

    for path in paths:
        config = json.loads((Path(path) / "config.json").read_text())
        name = config["model_type"]
        if name not in CONFIG_MAPPING and name not in _CONFIG_REGISTRY:
            members = {"model_type": name, "__init__": init}
            AutoConfig.register(name, type("Config", (PretrainedConfig,), members))


@contextlib.contextmanager
def configured(job: dict[str, Any]) -> Iterator[Any]:
    """Make a job's config the current one, with what a CPU lacks in place."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import destroy_model_parallel, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.models import ModelRegistry

    speculative_config = job["speculative_config"]
    know_model_types(job["model"], speculative_config.get("model", job["model"]))
    with contextlib.ExitStack() as stack:
        for name in job.get("modules", []):
            sys.modules[name] = mock.MagicMock()
            stack.callback(sys.modules.pop, name)
        known = dict(ModelRegistry.models)
        stack.callback(lambda: ModelRegistry.models.update(known))
        for architecture, path in job.get("classes", {}).items():
            module, _, name = path.partition(":")
            cls = getattr(importlib.import_module(module), name)
            ModelRegistry.register_model(architecture, cls)
        stack.enter_context(model_runner(job["loader"]))
        config = EngineArgs(
            job["model"],
            speculative_config=speculative_config,
            load_format=job["load_format"],
            enforce_eager=True,
            enable_prefix_caching=False,
            max_model_len=128,
            skip_tokenizer_init=True,
        ).create_engine_config()
        stack.enter_context(set_current_vllm_config(config))
        # Some groups are for mixtures of experts only.
        initialize_model_parallel(1, 1)
        stack.callback(destroy_model_parallel)
        stack.enter_context(stand_ins(job.get("stand_ins", [])))
        # Checkpoints here hold vocabulary tables and hardly anything else.
        stack.enter_context(
            mock.patch.object(DefaultModelLoader, "track_weights_loading")
        )
        yield config


def do(job: dict[str, Any]) -> dict[str, Any]:
    """Do one job."""
    with configured(job) as config:
        return {"estimated": estimate(config), **load(config, job["loader"])}


def prepare() -> None:
    """Do once what all jobs need."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment
    from vllm.model_executor.models import registry
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    # As vLLM's CPU model runner does.
    torch.accelerator.empty_cache = lambda: None
    # Twice per draft, it would take most of the time.
    gc.collect = lambda generation=2: 0
    registry._run_in_subprocess = lambda inspect: inspect()  # type: ignore[assignment]
    rendezvous = Path(tempfile.mkdtemp()) / "rendezvous"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")


def main(do: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Do the jobs, and print their reports."""
    sys.path.append(str(Path(__file__).parent))
    jobs = json.loads(Path(sys.argv[1]).read_text())
    prepare()
    reports = []
    for job in jobs:
        try:
            reports.append(do(job))
        except Exception as error:
            traceback.print_exc()
            reports.append({"error": f"{type(error).__name__}: {error}"})
    print(json.dumps(reports))


if __name__ == "__main__":
    main(do)
