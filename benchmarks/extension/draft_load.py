# SPDX-License-Identifier: Apache-2.0
"""A worker extension for vLLM that measures how a draft is loaded.

vLLM imports it in each worker once the plugins are loaded and the worker's class is
there: nothing is imported earlier than without it. From then on the proposers' method
that loads a draft is measured. What is done around it is the same, stock and patched.
"""

import contextlib
import functools
import gc
import importlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from page_cache import drop, fill, resident  # type: ignore[import-not-found]
from settled_memory import SettledMemory  # type: ignore[import-not-found]

# The legacy model runner's, and V2's.
PROPOSERS = {
    "vllm.v1.spec_decode.llm_base_proposer": "SpecDecodeBaseProposer",
    "vllm.v1.worker.gpu.spec_decode.speculator": "DraftModelSpeculator",
}
# What is done to each file of the checkpoint just before the draft loads.
PREPARE = {"cold": drop, "warm": fill}


class DraftLoad(SettledMemory):  # type: ignore[misc]
    """What the measurement of memory needs; importing this module does the rest."""


def measured(load: Callable[..., None]) -> Callable[..., None]:
    """Return a proposer's ``load_model`` that writes how long it took.

    ``DRAFT_LOAD_CHECKPOINT`` names the directory of the checkpoint,
    ``DRAFT_LOAD_CACHE`` how its files are to be found, and ``DRAFT_LOAD_RESULT`` the
    file to write: JSON with ``seconds``, how many of them Python's garbage collector
    took (``collecting_seconds``), ``read_bytes`` (from disk, by this process), and the
    bytes of each file in the page cache, ``cached_before`` and ``cached_after``.
    """

    @functools.wraps(load)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        files = sorted(Path(os.environ["DRAFT_LOAD_CHECKPOINT"]).glob("*.safetensors"))
        for file in files:
            PREPARE[os.environ["DRAFT_LOAD_CACHE"]](file)
        before = {file.name: resident(file) for file in files}
        collector = _Collector()
        gc.callbacks.append(collector)
        read, started = _read_bytes(), time.perf_counter()
        load(self, *args, **kwargs)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        gc.callbacks.remove(collector)
        result = {
            "seconds": seconds,
            "collecting_seconds": collector.seconds,
            "read_bytes": _read_bytes() - read,
            "cached_before": before,
            "cached_after": {file.name: resident(file) for file in files},
        }
        Path(os.environ["DRAFT_LOAD_RESULT"]).write_text(json.dumps(result))

    return load_model


class _Collector:
    """Is told when Python collects garbage; sums up how long that takes."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._started = now
        else:
            self.seconds += now - self._started


def _read_bytes() -> int:
    """Return what the kernel has read from disk for this process so far, in bytes."""
    with open("/proc/self/io", encoding="utf-8") as counters:
        for line in counters:
            if line.startswith("read_bytes:"):
                return int(line.split()[1])
    raise RuntimeError("the kernel does not say what was read from disk")


for module, name in PROPOSERS.items():
    with contextlib.suppress(ModuleNotFoundError):  # not every release has both
        proposer = getattr(importlib.import_module(module), name)
        proposer.load_model = measured(proposer.load_model)
