# SPDX-License-Identifier: Apache-2.0
"""Which distributions are installed, and in what version."""

import importlib.metadata
from pathlib import Path


def of_vllm(root: Path) -> importlib.metadata.Distribution | None:
    """Return the distribution that brought a vLLM, None where it is unknown.

    Args:
        root: Folder that holds the folder `vllm`.

    """
    for name in importlib.metadata.packages_distributions().get("vllm", []):
        distribution = importlib.metadata.distribution(name)
        if Path(str(distribution.locate_file("vllm"))).resolve().parent == root:
            return distribution
    return None


def of(name: str) -> str | None:
    """Return the version of a distribution, None where it isn't installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
