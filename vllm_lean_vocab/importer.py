# SPDX-License-Identifier: Apache-2.0
"""Serves patched modules to the running interpreter, in place of the installed ones."""

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any


class PatchedLoader(SourceLoader):
    """Loads a module from source that was checked when it was read.

    No byte code on disk is read or written. The file at `path` holds the same text; it
    is what tracebacks, `inspect` and vLLM's compile cache look at.
    """

    def __init__(
        self,
        path: Path,
        source: str,
        after_import: Callable[[ModuleType], None] | None = None,
    ) -> None:
        # Absolute: `__file__` is, and Dynamo wants both to be the same.
        self.path = os.path.abspath(path)
        self.source = source
        self.after_import = after_import

    def get_filename(self, fullname: str) -> str:
        return self.path

    def get_data(self, path: Any) -> bytes:
        return self.source.encode("utf-8")

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.source, self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if self.after_import is not None:
            self.after_import(module)


class PatchedFinder(MetaPathFinder):
    """Finds the patched modules; every other import is none of its business.

    Args:
        folder: Where the patched files lie.
        files: Text of each, by path, e.g. `vllm/model_executor/models/utils.py`.
        after_import: Called with each patched module once it has been imported.

    """

    def __init__(
        self,
        folder: Path,
        files: Mapping[str, str],
        after_import: Callable[[ModuleType], None] | None = None,
    ) -> None:
        self.loaders = {
            module_name(path): PatchedLoader(folder / path, source, after_import)
            for path, source in files.items()
        }

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> ModuleSpec | None:
        loader = self.loaders.get(fullname)
        if loader is None:
            return None
        return importlib.util.spec_from_file_location(
            fullname, loader.path, loader=loader
        )


def module_name(path: str) -> str:
    """Return the module that a file is imported as, e.g. `vllm.envs`."""
    return path.removesuffix(".py").replace("/", ".")


def imported_too_early(paths: list[str]) -> list[str]:
    """Return those of the files whose modules were imported already, unpatched."""
    return [
        path
        for path in paths
        if (module := sys.modules.get(module_name(path))) is not None
        and not isinstance(getattr(module, "__loader__", None), PatchedLoader)
    ]


def install(finder: PatchedFinder) -> None:
    """Put the finder before all others; it replaces one installed earlier."""
    sys.meta_path[:] = [
        finder,
        *(other for other in sys.meta_path if not isinstance(other, PatchedFinder)),
    ]
