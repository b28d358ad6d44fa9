# SPDX-License-Identifier: Apache-2.0
"""What a GPU's memory does while a draft loads, for the worker extension.

It is measured in the worker, because the V2 model runner doesn't log when a draft is
loaded. This has not been run on a GPU so far.
"""

import functools
import threading
import time
from types import TracebackType
from typing import Any

import torch

MIB = 2**20
# Seconds from one reading of the memory that is in use to the next.
INTERVAL = 0.01


class LoadingWindow:
    """Measures a GPU's memory from when it is entered to when it is left.

    Args:
        memory: What has the functions of ``torch.cuda`` that measure memory.
    """

    def __init__(self, memory: Any = torch.cuda) -> None:
        self._memory = memory
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> None:
        self._start = time.monotonic()
        self._before = self._levels()
        self._most_used = self._before["used"]
        self._memory.reset_peak_memory_stats()
        self._thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._peaks = {
            "allocated": self._memory.max_memory_allocated(),
            "reserved": self._memory.max_memory_reserved(),
            "used": max(self._most_used, self._levels()["used"]),
        }
        self._end = time.monotonic()

    def figures(self) -> dict[str, float]:
        """Return the levels in MiB and the duration in seconds, for a report.

        What is named after nothing is of allocated memory, as it is of anonymous
        memory on a CPU; ``reserved`` is what torch holds, ``used`` what all processes
        on this GPU do.
        """
        figures = {"after_mib": self._memory.memory_allocated() / MIB}
        for name, before in self._before.items():
            prefix = "" if name == "allocated" else f"{name}_"
            peak = self._peaks[name]
            figures[f"{prefix}before_mib"] = before / MIB
            figures[f"{prefix}peak_mib"] = peak / MIB
            figures[f"{prefix}peak_above_before_mib"] = (peak - before) / MIB
        rounded = {name: round(mib, 2) for name, mib in figures.items()}
        return rounded | {"window_s": round(self._end - self._start, 3)}

    def _levels(self) -> dict[str, int]:
        free, total = self._memory.mem_get_info()
        return {
            "allocated": self._memory.memory_allocated(),
            "reserved": self._memory.memory_reserved(),
            "used": total - free,
        }

    def _sample(self) -> None:
        while not self._stop.wait(INTERVAL):
            free, total = self._memory.mem_get_info()
            self._most_used = max(self._most_used, total - free)


# What was measured in this process.
WINDOWS: list[LoadingWindow] = []


def watch(proposer: type[Any], memory: Any = torch.cuda) -> None:
    """Have the memory measured whenever a proposer loads its draft.

    This is the time from where the legacy runner logs that it loads the draft to where
    the target's modules are attached.

    Args:
        proposer: The class whose ``load_model`` does both.
        memory: What `LoadingWindow` takes.
    """
    load_model = proposer.load_model

    @functools.wraps(load_model)
    def measured(*args: Any, **kwargs: Any) -> Any:
        window = LoadingWindow(memory)
        with window:
            result = load_model(*args, **kwargs)
        WINDOWS.append(window)
        return result

    proposer.load_model = measured


def watch_loading() -> None:
    """Have it measured with either model runner, from now on."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

    watch(SpecDecodeBaseProposer)
    watch(DraftModelSpeculator)
