# SPDX-License-Identifier: Apache-2.0
"""Serves patched modules to the running interpreter, in place of the installed ones.

A module that was imported before that can't be exchanged. Where a patch changes nothing
but the bodies of functions, the functions that are there can be given the new code.
"""

import ast
import contextlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import reduce
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple


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
        if_bypassed: Called once with a message, and with whether nothing is patched
            any more, if another finder took a module that is to be patched.

    """

    def __init__(
        self,
        folder: Path,
        files: Mapping[str, str],
        after_import: Callable[[ModuleType], None] | None = None,
        if_bypassed: Callable[[str, bool], None] | None = None,
    ) -> None:
        self.loaders = {
            module_name(path): PatchedLoader(folder / path, source, after_import)
            for path, source in files.items()
        }
        self.if_bypassed = if_bypassed
        self.withdrawn = False
        # Set by `install`: what was imported by then, and what undoes the swaps.
        self.earlier: Collection[str] = ()
        self.stock: list[Swap] = []

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> ModuleSpec | None:
        loader = self.loaders.get(fullname)
        if loader is None:
            return None
        if self in sys.meta_path:
            with contextlib.suppress(Exception):  # vLLM is in the middle of an import
                self._stay_whole()
        # A module that is new to vLLM may still be needed by a function that runs.
        if self.withdrawn and PathFinder.find_spec(fullname, path) is not None:
            return None
        return importlib.util.spec_from_file_location(
            fullname, loader.path, loader=loader
        )

    def undo_swaps(self) -> None:
        """Give functions of modules that were imported earlier their own code again."""
        while self.stock:
            function, code = self.stock.pop()
            function.__code__ = code

    def _stay_whole(self) -> None:
        """Come first again; withdraw if another finder has taken a module meanwhile.

        Import hooks (type checkers' for one) are put before all finders. One that was
        installed later than this may take some of the modules and leave others.
        """
        if sys.meta_path[0] is not self:
            sys.meta_path.remove(self)
            sys.meta_path.insert(0, self)
        later = [
            (name, getattr(module, "__file__", None) == loader.path)
            for name, loader in self.loaders.items()
            if name not in self.earlier and (module := sys.modules.get(name))
        ]
        taken = [name for name, patched in later if not patched]
        if taken and self.if_bypassed is not None:
            if len(taken) == len(later):
                self.withdrawn = True
                self.undo_swaps()
            tell, self.if_bypassed = self.if_bypassed, None
            tell(f"another import hook took {', '.join(taken)}", self.withdrawn)


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


class TooEarly(Exception):
    """A module was imported already, and its functions can't just be given new code."""


class Swap(NamedTuple):
    """New code for a function of a module that was imported already."""

    function: FunctionType
    code: CodeType


def swaps(name: str, stock: str, patched: str, path: Path) -> list[Swap]:
    """Return what makes an imported module run its patched source.

    Args:
        name: The module.
        stock: Its source.
        patched: The source it is to run.
        path: Where that lies.

    Raises:
        TooEarly: More than bodies of functions differ, or a function isn't what the
            source says.

    """
    module = sys.modules[name]
    old_bodies, new_bodies = _bodies(stock), _bodies(patched)
    if old_bodies.keys() != new_bodies.keys() or old_bodies[""] != new_bodies[""]:
        raise TooEarly("more than the bodies of functions changes")
    old_codes, new_codes = _codes(stock, module.__file__), _codes(patched, path)
    found: list[Swap] = []
    for where, body in old_bodies.items():
        if body == new_bodies[where]:
            continue
        function = reduce(_member, where.split("."), module)
        codes = old_codes[where] + new_codes[where]
        if not isinstance(function, FunctionType) or len(codes) != 2:
            raise TooEarly(f"{where} is no plain function")
        if function.__code__ not in codes:
            raise TooEarly(f"{where} was changed by others")
        if codes[0].co_freevars != codes[1].co_freevars:
            raise TooEarly(f"{where} uses other variables around it")
        found.append(Swap(function, codes[1]))
    return found


def _bodies(source: str) -> dict[str, str]:
    """Return the bodies of functions and methods, and as "" the module without them."""
    bodies: dict[str, str] = {}

    def take_from(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                name = prefix + child.name
                body = ast.dump(ast.Module(child.body, []))
                bodies[name] = bodies.get(name, "") + body
                child.body = []
            elif isinstance(child, ast.ClassDef):
                take_from(child, f"{prefix}{child.name}.")
            else:
                take_from(child, prefix)

    module = ast.parse(source)
    take_from(module, "")
    return {**bodies, "": ast.dump(module)}


def _codes(source: str, path: Any) -> dict[str, list[CodeType]]:
    """Return the code of functions and classes, by qualified name."""
    codes: dict[str, list[CodeType]] = {}
    todo = [compile(source, os.path.abspath(path), "exec", dont_inherit=True)]
    for code in todo:
        inner = [c for c in code.co_consts if isinstance(c, CodeType)]
        for each in inner:
            codes.setdefault(each.co_qualname, []).append(each)
        todo += inner
    return codes


def _member(outer: Any, name: str) -> Any:
    return inspect.unwrap(inspect.getattr_static(outer, name, None))


def install(finder: PatchedFinder, swaps: Iterable[Swap] = ()) -> None:
    """Put the finder before all others; it replaces one installed earlier.

    Args:
        finder: Serves modules that are imported from now on.
        swaps: For those that were imported already.

    """
    try:
        for function, code in swaps:
            finder.stock.append(Swap(function, function.__code__))
            function.__code__ = code
    except BaseException:  # all of them or none
        finder.undo_swaps()
        raise
    finder.earlier = finder.loaders.keys() & sys.modules.keys()
    sys.meta_path[:] = [
        finder,
        *(other for other in sys.meta_path if not isinstance(other, PatchedFinder)),
    ]
