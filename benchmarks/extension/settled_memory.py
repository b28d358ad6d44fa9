# SPDX-License-Identifier: Apache-2.0
"""A worker extension for vLLM that says what a worker's memory settles at.

It stands in a folder of its own, which ``PYTHONPATH`` brings into the workers
without anything else of this repository.
"""

import gc
import os


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
