# SPDX-License-Identifier: Apache-2.0
"""A worker extension for vLLM that says what a worker's memory is and was.

It stands in a folder of its own, which ``PYTHONPATH`` brings into the workers
without anything else of this repository.
"""

import gc
import os

import torch

if torch.cuda.is_available():
    import cuda_memory  # type: ignore[import-not-found]

    cuda_memory.watch_loading()


class SettledMemory:
    """Methods that vLLM adds to its worker class."""

    def settled_memory(self) -> list[int]:
        """Return this process's id and its anonymous memory in bytes.

        A table that a draft gave up is kept by a reference cycle (its parameter
        holds a method of its module) until Python looks for such cycles. On a GPU
        vLLM makes it look before it measures what is left; a worker on CPU does so
        when it likes, so it is made to here.
        """
        gc.collect()
        with open("/proc/self/status", encoding="utf-8") as status:
            for line in status:
                if line.startswith("RssAnon:"):
                    return [os.getpid(), int(line.split()[1]) * 1024]
        raise RuntimeError("the kernel does not say how much memory is anonymous")

    def draft_device_memory(self) -> dict[str, float] | None:
        """Return the levels of the GPU's memory while the draft loaded.

        As ``LoadingWindow.figures`` does; None without a GPU or a draft.
        """
        if not torch.cuda.is_available() or not cuda_memory.WINDOWS:
            return None
        gc.collect()
        figures: dict[str, float] = cuda_memory.WINDOWS[-1].figures()
        return figures

    def runner_name(self) -> str:
        """Return which model runner this worker has, ``legacy`` or ``v2``."""
        return "v2" if getattr(self, "use_v2_model_runner", False) else "legacy"
