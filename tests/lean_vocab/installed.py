# SPDX-License-Identifier: Apache-2.0
"""The files of the installed vLLM that the pull requests are about."""

import importlib.util
import inspect
import os
import sys
from pathlib import Path

from vllm_lean_vocab.importer import PatchedLoader, module_name
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


def copy_sources(root: Path) -> None:
    """Write those files into a folder, as a vLLM that holds nothing else."""
    for path, text in {"vllm/__init__.py": "", **sources()}.items():
        if text is not None:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)


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


def is_patched(name: str) -> bool:
    """Return whether a module is patched, or its functions are if it came earlier."""
    module = sys.modules.get(name)
    if module is None or isinstance(module.__loader__, PatchedLoader):
        spec = importlib.util.find_spec(name)
        return spec is not None and isinstance(spec.loader, PatchedLoader)
    classes = [c for c in vars(module).values() if inspect.isclass(c)]
    return any(
        inspect.isfunction(function)
        and function.__module__ == name
        and f"{os.sep}lean_vocab{os.sep}" in function.__code__.co_filename
        for outer in (module, *classes)
        for function in vars(outer).values()
    )
