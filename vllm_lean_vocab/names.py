# SPDX-License-Identifier: Apache-2.0
"""Checks that a change finds the names it uses: it would fail once it is served."""

import ast
import builtins
import re
import symtable
import textwrap
from collections.abc import Iterable, Mapping

from vllm_lean_vocab.edits import In, Insert, Refused


def check_names(path: str, before: str, after: str) -> None:
    """Check that a change uses no names that its file does not define.

    Such a change would fail when its code runs: in vLLM, while a model is built.

    Args:
        path: The file, from the root of vLLM's repository.
        before: Its text.
        after: Its text with the change.

    Raises:
        Refused: It does.

    """
    if undefined := _undefined_names(after) - _undefined_names(before):
        names = ", ".join(sorted(undefined))
        raise Refused(f"{path}: the change uses names that are not there: {names}")


def check_imports(
    path: str, imports: Iterable[ast.AST], texts: Mapping[str, str | None]
) -> None:
    """Check that what a file imports is there, as far as the files are known.

    A vLLM may have a new file of a pull request already, with other names in it, or
    have moved what a new file needs.

    Args:
        path: The file, from the root of vLLM's repository.
        imports: Imports, and any other nodes, of a change to it.
        texts: Text of files by path, None where there is no such file.

    Raises:
        Refused: A module is missing, or a name in it.

    """
    for statement in imports:
        if not isinstance(statement, ast.ImportFrom):
            continue
        package = path.split("/")[: -statement.level] if statement.level else []
        stem = "/".join([*package, *(statement.module or "").split(".")])
        places = [p for p in (f"{stem}.py", f"{stem}/__init__.py") if p in texts]
        source = next((p for p in places if texts[p] is not None), None)
        if source is None:
            if len(places) == 2:
                raise Refused(f"{places[0]}: not there, and {path} would import it")
            continue
        text = texts[source] or ""
        if re.search(r"^from \S+ import \*", text, re.MULTILINE):
            continue  # its names come from elsewhere
        defined = defined_names(symtable.symtable(text, source, "exec"))
        missing = {alias.name for alias in statement.names} - defined
        if missing:
            names = ", ".join(sorted(missing))
            raise Refused(f"{source}: has no {names}, which {path} would import")


def inserted_statements(edits: In) -> list[ast.stmt]:
    """Return the statements that edits insert into a file."""
    inserts = [edit for edit in edits.edits if isinstance(edit, Insert)]
    return [statement for edit in inserts for statement in _statements_of(edit)]


def import_of(edit: Insert) -> ast.ImportFrom:
    """Return the statement that an `Insert` at the top of a file inserts."""
    [statement] = _statements_of(edit)
    assert isinstance(statement, ast.ImportFrom)
    return statement


def _statements_of(edit: Insert) -> list[ast.stmt]:
    return ast.parse(textwrap.dedent(edit.code).strip()).body


def _undefined_names(source: str) -> set[str]:
    """Return the global names that a module uses and does not define."""
    module = symtable.symtable(source, "<source>", "exec")
    tables, used = [module], set()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        used |= {
            symbol.get_name()
            for symbol in table.get_symbols()
            if symbol.is_referenced() and (symbol.is_global() or table is module)
        }
    known = {*dir(builtins), "__file__", "__name__"}
    return used - defined_names(module) - known


def defined_names(module: symtable.SymbolTable) -> set[str]:
    """Return the names that a module defines or imports at its top level."""
    return {
        symbol.get_name()
        for symbol in module.get_symbols()
        if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
    }
