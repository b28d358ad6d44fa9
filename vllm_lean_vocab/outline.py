# SPDX-License-Identifier: Apache-2.0
"""Leaves functions that no edit looks into out of a source text, and puts them back.

LibCST takes time for every line, much more than Python's own parser, which says where
functions begin and end.
"""

import ast
from collections.abc import Collection, Iterator, Mapping

MARK = "_left_out_"


def shorten(source: str, wheres: Collection[str]) -> tuple[str, dict[str, str]]:
    """Leave out the bodies of functions that are not addressed.

    Args:
        source: Text of a file.
        wheres: Dotted names of the classes and functions that are addressed; empty for
            the file as a whole. They stay as they are, with all that is in them.

    Returns:
        The text with one line in place of each body that is left out, and the bodies by
        these lines, for `restore`. What can't be parsed stays as it is.

    """
    if MARK in source or "\r" in source:  # such lines are counted in other ways
        return source, {}
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError):
        return source, {}
    lines = source.split("\n")
    left_out: dict[str, str] = {}
    # From the end: what is still to come keeps its line numbers.
    for name, function in reversed([*_functions(module, "")]):
        first, last = _lines_of_body(function)
        indent = lines[first][: function.body[0].col_offset]
        if indent.strip() or any(_is_within(name, where) for where in wheres):
            continue
        line = f"{indent}{MARK}{len(left_out)}"
        left_out[line] = "\n".join(lines[first:last])
        lines[first:last] = [line]
    return "\n".join(lines), left_out


def restore(text: str, left_out: Mapping[str, str]) -> str:
    """Put the bodies that `shorten` left out back into a text."""
    return "\n".join(left_out.get(line, line) for line in text.split("\n"))


def _functions(
    outer: ast.AST, prefix: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield functions and methods by dotted name, not those inside functions."""
    for node in ast.iter_child_nodes(outer):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")
        elif not isinstance(node, ast.expr):
            yield from _functions(node, prefix)


def _lines_of_body(
    function: ast.FunctionDef | ast.AsyncFunctionDef,
) -> tuple[int, int]:
    """Return the index of the first line of a body and that of the line after it."""
    first = function.body[0]
    decorators = getattr(first, "decorator_list", [])
    start = min(node.lineno for node in (first, *decorators))
    assert function.end_lineno is not None
    return start - 1, function.end_lineno


def _is_within(name: str, where: str) -> bool:
    """Return whether one of two definitions holds the other; the file holds all."""
    one, other = f"{name}.", f"{where}."
    return not where or one.startswith(other) or other.startswith(one)
