# SPDX-License-Identifier: Apache-2.0
"""The files of the installed vLLM that the pull requests are about."""

import importlib.util
from pathlib import Path

from vllm_lean_vocab.importer import module_name
from vllm_lean_vocab.plan import source_paths
from vllm_lean_vocab.series import SERIES


def root() -> Path:
    """Return the folder that holds the installed `vllm`."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent.parent


def sources() -> dict[str, str | None]:
    """Return their texts, None for those that this vLLM doesn't have."""
    paths = {path: root() / path for path in source_paths(SERIES)}
    return {
        path: file.read_text() if file.exists() else None
        for path, file in paths.items()
    }


def served_modules(*ids: str) -> set[str]:
    """Return the modules that these pull requests change or bring, by default all."""
    return {
        module_name(path)
        for pull_request in SERIES
        if not ids or pull_request.id in ids
        for path in (*pull_request.edited_paths, *pull_request.new_files)
        # Where the state of vLLM decides on the file, there is one of them.
        if path in pull_request.new_files or (root() / path).exists()
    }
