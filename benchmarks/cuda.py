# SPDX-License-Identifier: Apache-2.0
"""Lets ``benchmarks.load_peak`` measure a GPU's memory where there is one.

It has not been run on a GPU so far. The worker's side is ``extension/cuda_memory.py``.
"""

from typing import Any

import torch

# A KV cache as large as on a CPU: it would take whatever is left of the GPU.
ENGINE_ARGS: dict[str, Any] = {"kv_cache_memory_bytes": 2**30}


def engine_arguments() -> dict[str, Any]:
    """Return the arguments of ``run_engine`` that measuring a GPU takes; else none."""
    return ENGINE_ARGS if torch.cuda.is_available() else {}


def gpu() -> dict[str, str]:
    """Return what a report's machine has besides: the name of the GPU, if there is one.

    Raises:
        RuntimeError: It does not answer.
    """
    if not torch.cuda.is_available():
        return {}
    return {"gpu": torch.cuda.get_device_name()}
