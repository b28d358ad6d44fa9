# SPDX-License-Identifier: Apache-2.0
"""Loads targets and their drafts with vLLM's own loaders, and reports on the drafts.

Run as a file, one process per pipeline stage, with options as one JSON object:
`pipeline_parallel_size`, `rank`, `rendezvous` (a file URL), and `jobs`, a list of
objects: `model`, `proposer` (`legacy` or `v2`), `num_speculative_tokens`, and what a
CPU lacks for it: `sparse_attention`, `nvfp4_kernel`. Prints one JSON list as its last
line: for each job what was loaded, or the `error` that it ended in.

The engine itself can't be used for this on a CPU: it has no V2 runner there, and does
not serve a draft with more than one pipeline stage.
"""

import contextlib
import json
import logging
import sys
import traceback
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AllocationRecorder(TorchDispatchMode):
    """Records the size in bytes of every storage that an operator allocates.

    A storage that an operator was given, such as one mapped from a file, is none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = [0]
        self.seen: dict[int, torch.UntypedStorage] = {}  # kept: no address comes twice

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self._see((args, kwargs))
        result = func(*args, **(kwargs or {}))
        self.sizes += self._see(result)
        return result

    def _see(self, values: Any) -> list[int]:
        new = []
        for value in tree_leaves(values):
            if isinstance(value, torch.Tensor):
                value = value.untyped_storage()
            if isinstance(value, torch.UntypedStorage) and value.device.type != "meta":
                if value.data_ptr() not in self.seen:
                    new.append(value.nbytes())
                self.seen[value.data_ptr()] = value
        return new


def describe(module: Any) -> dict[str, Any]:
    """Return a module's class, and its parameters' size in bytes, dtypes and sum.

    Parameters on `meta` count as none.
    """
    parameters = [] if module is None else list(module.parameters())
    parameters = [p for p in parameters if not p.is_meta]
    return {
        "class": type(module).__name__,
        "nbytes": sum(p.nbytes for p in parameters),
        "dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in parameters}),
        "checksum": sum(float(p.double().sum()) for p in parameters),
    }


def vocabulary(draft: Any) -> dict[str, Any]:
    """Return the vocabulary modules that a draft looks up and projects with."""
    layers = draft.model.layers
    if isinstance(layers, nn.ModuleDict):  # heads of MTP layers, by their numbers
        heads = {f"head {n}": layer.shared_head.head for n, layer in layers.items()}
    else:
        heads = {"lm_head": draft.lm_head}
    return {"embed_tokens": draft.model.embed_tokens, **heads}


def describe_all(draft: Any) -> dict[str, Any]:
    return {name: describe(module) for name, module in vocabulary(draft).items()}


class NoAttention(nn.Module):
    """Stands in for the innermost sparse attention: a CPU has no backend for it.

    It has no parameters; the projections and the indexer around it are vLLM's.
    """

    def __init__(self, *, prefix: str = "", **_: Any) -> None:
        super().__init__()
        self.layer_name = prefix


def register_nvfp4_kernel() -> None:
    """Let vLLM choose its own emulation of NVFP4: it lists no kernel for a CPU."""
    from vllm.model_executor.kernels.linear import register_linear_kernel
    from vllm.model_executor.kernels.linear.nvfp4.emulation import (
        EmulationNvFp4LinearKernel,
    )
    from vllm.platforms import PlatformEnum

    register_linear_kernel(EmulationNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")


@contextlib.contextmanager
def what_a_cpu_lacks(job: dict[str, Any]) -> Iterator[None]:
    """Put something in place of what a job needs and a CPU doesn't have."""
    from vllm.model_executor.layers import mla

    # As vLLM's CPU model runner does.
    torch.accelerator.empty_cache = lambda: None
    if job.get("nvfp4_kernel"):
        register_nvfp4_kernel()
    attention = NoAttention if job.get("sparse_attention") else mla.MLAAttention
    with mock.patch.object(mla, "MLAAttention", attention):
        yield


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Collect what vLLM logs."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("vllm").addHandler(handler)
    try:
        yield texts
    finally:
        logging.getLogger("vllm").removeHandler(handler)


def load(config: Any, proposer: str, is_last_stage: bool) -> dict[str, Any]:
    """Load a target's stage and, on the last one, the draft; report on the draft."""
    from vllm.model_executor.model_loader import get_model
    from vllm.v1.spec_decode import llm_base_proposer
    from vllm.v1.spec_decode.eagle import EagleProposer
    from vllm.v1.worker.gpu.spec_decode.eagle import utils as v2

    target = get_model(vllm_config=config)
    if not is_last_stage:
        return {}
    built: dict[str, Any] = {}

    def recording_get_model(*args: Any, **kwargs: Any) -> Any:
        with AllocationRecorder() as recorder:
            draft = get_model(*args, **kwargs)
        built["largest"] = max(recorder.sizes)
        built["modules"] = describe_all(draft)
        return draft

    with (
        logged() as texts,
        mock.patch.object(llm_base_proposer, "get_model", recording_get_model),
        mock.patch.object(v2, "get_model", recording_get_model),
    ):
        if proposer == "v2":
            draft = v2.load_eagle_model(target, config)
        else:
            legacy = EagleProposer(config, torch.device("cpu"))
            legacy.load_model(target)
            draft = legacy.model

    language_model = target
    if hasattr(target, "get_language_model"):
        language_model = target.get_language_model()
    tables = language_model.model.embed_tokens, language_model.lm_head
    attached = {
        name: module is tables[name != "embed_tokens"]
        for name, module in vocabulary(draft).items()
    }
    return {
        "draft": type(draft).__name__,
        "built": built,
        "attached": attached,
        "final": describe_all(draft),
        "log": texts,
    }


def main() -> None:
    """Do the jobs, and print their reports."""
    options = json.loads(sys.argv[1])
    stages, rank = options["pipeline_parallel_size"], options["rank"]

    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.engine.arg_utils import EngineArgs

    reports = []
    for number, job in enumerate(options["jobs"]):
        config = EngineArgs(
            job["model"],
            speculative_config={
                "method": "mtp",
                "num_speculative_tokens": job.get("num_speculative_tokens", 1),
            },
            pipeline_parallel_size=stages,
            distributed_executor_backend="mp",
            enforce_eager=True,
            enable_prefix_caching=False,
            max_model_len=512,
            skip_tokenizer_init=True,
        ).create_engine_config()
        with set_current_vllm_config(config):
            if number == 0:
                rendezvous = options["rendezvous"]
                init_distributed_environment(stages, rank, rendezvous, 0, "gloo")
            # Some groups are for mixtures of experts only.
            initialize_model_parallel(1, stages)
            try:
                # Not earlier: the plugins are loaded by now.
                with what_a_cpu_lacks(job):
                    report = load(config, job["proposer"], rank == stages - 1)
            except Exception as error:
                traceback.print_exc()
                report = {"error": f"{type(error).__name__}: {error}"}
            finally:
                destroy_model_parallel()
        reports.append(report)
    print(json.dumps(reports))


if __name__ == "__main__":
    main()
