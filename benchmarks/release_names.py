# SPDX-License-Identifier: Apache-2.0
"""Whether the names that changed files import from vLLM are there in a release.

Read from its Python files, without importing it. `vllm_lean_vocab.names` checks this
among the files that a plan knows; here every file of the release is known.
"""

import ast
import symtable
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from vllm_lean_vocab.names import defined_names


class Imported(NamedTuple):
    """A name that a file imports from a module of vLLM.

    Attributes:
        module: The module's dotted name.
        name: The name in it, or `*`.

    """

    module: str
    name: str


def imported_names(path: str, source: str) -> set[Imported]:
    """Return what a file imports from vLLM by `from ... import`, at any depth.

    Args:
        path: The file, from the root of vLLM's repository.
        source: Its text.

    Raises:
        SyntaxError: It is no valid Python.

    """
    return {
        Imported(module, alias.name)
        for statement in ast.walk(ast.parse(source))
        if isinstance(statement, ast.ImportFrom)
        and (module := _module(path, statement)).partition(".")[0] == "vllm"
        for alias in statement.names
    }


def missing_names(root: Path, files: Mapping[str, str]) -> list[str]:
    """Return each name that changed files newly import and the release doesn't have.

    Args:
        root: Folder that holds the release's folder `vllm`.
        files: New text of each file that is changed or new, by its path from there.

    Raises:
        SyntaxError: A file is no valid Python.

    """
    release = _Release(root, files)
    missing = []
    for path, text in files.items():
        stock = root / path
        before = (
            imported_names(path, stock.read_text(encoding="utf-8"))
            if stock.exists()
            else set()
        )
        missing += [
            f"{path}: imports {name} from {module}, which has no such name"
            for module, name in sorted(imported_names(path, text) - before)
            if not release.defines(module, name)
        ]
    return missing


class _Release:
    """The modules of a release, as changed."""

    def __init__(self, root: Path, files: Mapping[str, str]) -> None:
        self.root, self.files = root, files

    def defines(self, module: str, name: str) -> bool:
        """Return whether a module has a name, which may be a module below it."""
        if self._file(f"{module}.{name}") is not None:
            return True
        file = self._file(module)
        if file is None:
            return False
        path, text = file
        if name in defined_names(symtable.symtable(text, path, "exec")):
            return True
        return any(self.defines(star, name) for star in _stars(path, text))

    def _file(self, module: str) -> tuple[str, str] | None:
        """Return path and text of a module's file, None where there is none."""
        stem = module.replace(".", "/")
        for path in (f"{stem}.py", f"{stem}/__init__.py"):
            if path in self.files:
                return path, self.files[path]
            if (self.root / path).is_file():
                return path, (self.root / path).read_text(encoding="utf-8")
        return None


def _stars(path: str, text: str) -> Iterator[str]:
    """Yield the modules of which a file imports everything."""
    return (i.module for i in imported_names(path, text) if i.name == "*")


def _module(path: str, statement: ast.ImportFrom) -> str:
    """Return the dotted name of the module that a statement imports from."""
    package = path.split("/")[: -statement.level] if statement.level else []
    return ".".join([*package, *filter(None, [statement.module])])
