# SPDX-License-Identifier: Apache-2.0
"""Checks that a change finds the names it uses: it would fail once it is served."""

import ast
import builtins
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
    path: str, imports: Iterable[ast.stmt], texts: Mapping[str, str | None]
) -> None:
    """Check that what a file imports is there, as far as the files are known.

    A vLLM may have a new file of a pull request already, with other names in it.

    Args:
        path: The file, from the root of vLLM's repository.
        imports: Imports, and any other statements, of a change to it.
        texts: Text of files by path.

    Raises:
        Refused: A name is missing in the file that it is imported from.

    """
    for statement in imports:
        if not isinstance(statement, ast.ImportFrom):
            continue
        package = path.split("/")[: -statement.level] if statement.level else []
        source = "/".join([*package, *(statement.module or "").split(".")]) + ".py"
        if (text := texts.get(source)) is None:
            continue
        defined = _defined_names(symtable.symtable(text, source, "exec"))
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
    return used - _defined_names(module) - known


def _defined_names(module: symtable.SymbolTable) -> set[str]:
    return {
        symbol.get_name()
        for symbol in module.get_symbols()
        if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
    }
