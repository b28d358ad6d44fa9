# SPDX-License-Identifier: Apache-2.0
"""Carries out edits on a source text, with LibCST.

LibCST keeps layout and comments of what is not changed. Patterns are compared on
Python's own syntax trees, which know neither.
"""

import ast
import dataclasses
import itertools
import re
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, TypeVar

import libcst as cst

from vllm_lean_vocab.edits import (
    AddArguments,
    AddParameter,
    Edit,
    Enclose,
    Has,
    In,
    Insert,
    Refused,
    Remove,
    Replace,
)
from vllm_lean_vocab.names import import_of
from vllm_lean_vocab.outline import restore, shorten

# Kinds of nodes that Python and LibCST have the same name for.
_SAME_NAMES = {
    "Assign",
    "Attribute",
    "Call",
    "Expr",
    "Name",
    "Return",
    "Subscript",
}

Node = TypeVar("Node", bound=cst.CSTNode)

WORD = re.compile(r"[^\W\d]\w*")


def apply_edits(source: str, edits: In) -> tuple[str, bool]:
    """Carry out the edits to one file.

    Args:
        source: Text of the file.
        edits: What to change in it.

    Returns:
        The new text, and whether every edit was there already (the text is unchanged).

    Raises:
        Refused: An edit does not match exactly one place, or only some of the edits are
            in the file already.

    """
    # An import goes to the top of the file, whatever is in it.
    wheres = [
        edit.where for edit in edits.edits if edit.where or not isinstance(edit, Insert)
    ]
    outline, left_out = shorten(source, wheres)
    module = _parse(outline, edits.path)
    words = set(WORD.findall(source))
    present = [
        words.issuperset(_words_of(edit)) and _is_present(module, edit)
        for edit in edits.edits
    ]
    if all(present):
        return source, True
    for edit, is_there in zip(edits.edits, present, strict=True):
        # That a definition is missing says less: its removal is refused below.
        if is_there and not isinstance(edit, Remove):
            raise Refused(
                f"{edits.path}: {edit.where or 'top of the file'}: some of the change "
                f"is there already: {_one_line(_code_of(edit))}"
            )
    for edit in edits.edits:
        try:
            module = _apply(module, edit)
        except Refused as error:
            raise Refused(f"{edits.path}: {error}") from None
    text = restore(module.code, left_out)
    try:
        ast.parse(text)
    except SyntaxError as error:
        raise Refused(f"{edits.path}: edited, it is no valid Python: {error}") from None
    return text, False


def has_statement(source: str, has: Has) -> bool:
    """Return whether a file holds a statement.

    Args:
        source: Text of the file.
        has: The statement, and where to look for it.

    Raises:
        Refused: The file can't be parsed.

    """
    outline, _ = shorten(source, [has.where])
    module = _parse(outline, has.path)
    return any(
        _find(scope, _statements, module, has.statement)
        for scope in _scopes(module, has.where)
    )


def _parse(source: str, path: str) -> cst.Module:
    try:
        return cst.parse_module(source)
    except cst.ParserSyntaxError as error:
        raise Refused(f"{path}: can't be parsed: {error.message}") from error


def _apply(module: cst.Module, edit: Edit) -> cst.Module:
    if isinstance(edit, Replace):
        scope = _the_scope(module, edit.where)
        around = _the_one(scope, _nodes, module, edit.within, edit.where)
        old = _the_one(around, _expressions, module, edit.old, edit.where)
        new = cst.parse_expression(edit.new)
        safe = _parenthesised(module, around, old, new)
        return _substitute(module, old, [safe])
    if isinstance(edit, Enclose):
        scope = _the_scope(module, edit.where)
        inner = _the_one(scope, _statements, module, edit.statement, edit.where)
        assert isinstance(inner, cst.SimpleStatementLine)
        new_with = cst.ensure_type(
            cst.parse_statement(f"with {edit.code}:\n    pass"), cst.With
        )
        for outer in _withs(scope):
            if list(outer.body.body) == [inner]:  # takes it as one more
                last = outer.items[-1].with_changes(
                    comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
                )
                items = [*outer.items[:-1], last, *new_with.items]
                both = outer.with_changes(items=items)
                return _substitute(module, outer, [both])
        enclosing = new_with.with_changes(
            body=cst.IndentedBlock([inner.with_changes(leading_lines=())]),
            leading_lines=inner.leading_lines,
        )
        return _substitute(module, inner, [enclosing])
    if isinstance(edit, Remove):
        return _substitute(module, _the_scope(module, edit.where), [])
    if isinstance(edit, AddParameter):
        return _add_parameter(module, edit)
    if isinstance(edit, AddArguments):
        scope = _the_scope(module, edit.where)
        call = _the_one(scope, _expressions, module, edit.call, edit.where)
        added = cst.ensure_type(cst.parse_expression(f"f({edit.code})"), cst.Call).args
        old_args = cst.ensure_type(call, cst.Call).args
        with_them = call.with_changes(args=[*old_args, *added])
        return _substitute(module, call, [with_them])
    code = cst.parse_module(textwrap.dedent(edit.code).strip() + "\n")
    if not edit.where:
        return _insert_import(module, code.body[0])
    if bool(edit.before) == bool(edit.after):
        raise ValueError(f"{edit.where}: an Insert takes `before` or `after`")
    scope = _the_scope(module, edit.where)
    anchor = _the_one(scope, _statements, module, edit.before or edit.after, edit.where)
    if edit.before:
        return _substitute(module, anchor, [*code.body, anchor])
    return _substitute(module, anchor, [anchor, *code.body])


def _words_of(edit: Edit) -> list[str]:
    """Return words that a file holds where the edit is present: quickly looked up."""
    return [] if isinstance(edit, Remove) else WORD.findall(_code_of(edit))


def _is_present(module: cst.Module, edit: Edit) -> bool:
    scopes = _scopes(module, edit.where)
    if isinstance(edit, Replace):
        return any(_find(s, _expressions, module, edit.new) for s in scopes)
    if isinstance(edit, AddArguments):
        with_them = f"{edit.call.removesuffix(')')}, {edit.code})"
        return any(_find(s, _expressions, module, with_them) for s in scopes)
    if isinstance(edit, Enclose):
        around = f"with {edit.code}:\n    {edit.statement}"
        return any(_find(s, _withs_and_parts, module, around) for s in scopes)
    if isinstance(edit, Remove):
        return not scopes
    if isinstance(edit, AddParameter):
        return any(
            parameter.name.value == _parameter(edit).name.value
            for scope in scopes
            if isinstance(scope, cst.FunctionDef)
            for parameter in (*scope.params.params, *scope.params.kwonly_params)
        )
    code = textwrap.dedent(edit.code).strip()
    if not edit.where:
        wanted = import_of(edit)
        imported = {
            alias.name
            for line in module.body
            if isinstance(line, cst.SimpleStatementLine)
            and isinstance(line.body[0], cst.ImportFrom)
            and isinstance(node := _syntax_tree(module, line), ast.ImportFrom)
            and (node.module, node.level) == (wanted.module, wanted.level)
            for alias in node.names
        }
        return imported >= {alias.name for alias in wanted.names}
    return any(
        all(
            _find(scope, _statements, module, ast.unparse(statement))
            for statement in ast.parse(code).body
        )
        for scope in scopes
    )


# ---------------------------------------------------------------- finding a place


@cache
def _fields(kind: type[cst.CSTNode]) -> list[str]:
    """Return where a kind of node has others; what is whitespace holds no code."""
    names = [field.name for field in dataclasses.fields(kind)]
    return [name for name in names if not name.startswith("whitespace")]


def _children(outer: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield the nodes right below one, as its slow `children` would."""
    for name in _fields(type(outer)):
        part = getattr(outer, name)
        if isinstance(part, cst.CSTNode):
            yield part
        elif isinstance(part, list | tuple):
            yield from part


def _scopes(module: cst.Module, where: str) -> list[cst.CSTNode]:
    found: list[cst.CSTNode] = [module]
    for name in where.split(".") if where else ():
        found = [
            node
            for outer in found
            for node in _definitions(outer)
            if node.name.value == name
        ]
    return found


def _definitions(outer: cst.CSTNode) -> Iterator[cst.FunctionDef | cst.ClassDef]:
    """Yield the definitions in a node, not those inside other definitions."""
    for node in _children(outer):
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            yield node
        elif not isinstance(node, cst.SimpleStatementLine | cst.BaseExpression):
            yield from _definitions(node)


def _the_scope(module: cst.Module, where: str) -> cst.CSTNode:
    # Those around it have to be the only ones of their names, too.
    names = [*itertools.accumulate(where.split("."), "{}.{}".format)]
    found = {name: _scopes(module, name) for name in reversed(names)}
    for name, scopes in found.items():
        if len(scopes) != 1:
            raise Refused(f"{name}: expected one definition, found {len(scopes)}")
    return found[where][0]


def _the_one(
    scope: cst.CSTNode, kinds: Any, module: cst.Module, pattern: str, where: str
) -> cst.CSTNode:
    found = _find(scope, kinds, module, pattern)
    if len(found) != 1:
        raise Refused(
            f"{where}: expected one match of `{_one_line(pattern)}`, found {len(found)}"
        )
    return found[0]


def _find(
    scope: cst.CSTNode, kinds: Any, module: cst.Module, pattern: str
) -> list[cst.CSTNode]:
    [wanted] = ast.parse(pattern).body
    return [
        node
        for node in kinds(scope)
        if _may_match(wanted, node) and _matches(wanted, _syntax_tree(module, node))
    ]


def _may_match(wanted: ast.stmt, node: cst.CSTNode) -> bool:
    """Return whether a node is of the pattern's kind: most are not, quickly said."""
    inner: ast.AST = wanted
    if isinstance(node, cst.SimpleStatementLine):
        node = node.body[0]
    elif isinstance(wanted, ast.Expr):
        inner = wanted.value
    kinds = type(inner).__name__, type(node).__name__
    return kinds[0] == kinds[1] or not _SAME_NAMES.issuperset(kinds)


def _statements(scope: cst.CSTNode) -> Iterator[cst.CSTNode]:
    for node in _children(scope):
        if isinstance(node, cst.SimpleStatementLine):
            yield node
        else:
            yield from _statements(node)


def _withs(scope: cst.CSTNode) -> Iterator[cst.With]:
    for node in _children(scope):
        if isinstance(node, cst.With):
            yield node
        yield from _withs(node)


def _withs_and_parts(scope: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield `with` statements, also as they are without their first managers."""
    for node in _withs(scope):
        for first in range(len(node.items)):
            yield node.with_changes(items=node.items[first:])


def _expressions(scope: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield the expressions in a node; names of attributes and keywords are none."""
    names = [
        getattr(scope, part, None)
        for part in ("attr", "keyword", "name", "asname", "module")
    ]
    for node in _children(scope):
        if any(node is name for name in names):
            continue
        if isinstance(node, cst.BaseExpression):
            yield node
        yield from _expressions(node)


def _nodes(scope: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield statements and expressions; a statement that is an expression, once."""
    for statement in _statements(scope):
        if not isinstance(statement, cst.SimpleStatementLine) or not isinstance(
            statement.body[0], cst.Expr
        ):
            yield statement
    yield from _expressions(scope)


def _syntax_tree(module: cst.Module, node: cst.CSTNode) -> ast.stmt | None:
    code = module.code_for_node(node)
    if isinstance(node, cst.BaseExpression):
        code = f"({code})"
    try:
        body = ast.parse(code).body
    except SyntaxError:  # e.g. a part of an f-string
        return None
    return body[0] if len(body) == 1 else None  # not `x = 1; y = 2`


def _matches(pattern: Any, node: Any) -> bool:
    if isinstance(pattern, ast.Constant) and pattern.value is ...:
        return isinstance(node, ast.expr)
    if isinstance(pattern, list):
        return (
            isinstance(node, list)
            and len(pattern) == len(node)
            and all(map(_matches, pattern, node))
        )
    if not isinstance(pattern, ast.AST):
        return type(pattern) is type(node) and bool(pattern == node)
    if isinstance(pattern, ast.Call) and _takes_anything(pattern):
        return isinstance(node, ast.Call) and _matches(pattern.func, node.func)
    if type(pattern) is not type(node):
        return False
    return all(
        _matches(getattr(pattern, name, None), getattr(node, name, None))
        for name in pattern._fields
        if name not in ("ctx", "kind", "type_comment")
    )


def _takes_anything(call: ast.Call) -> bool:
    """Return whether a pattern is `f(...)`."""
    anything = [ast.dump(ast.Constant(...))]
    return not call.keywords and [ast.dump(arg) for arg in call.args] == anything


# -------------------------------------------------------------- changing the tree


def _substitute(root: Node, old: cst.CSTNode, new: Sequence[cst.CSTNode]) -> Node:
    """Return a tree with other nodes in the place of one, or as it is without that.

    LibCST's transformers do the same, and make every other node of the tree anew.
    """
    for name in _fields(type(root)):
        part = getattr(root, name)
        if isinstance(part, cst.CSTNode):
            changed = new[0] if part is old else _substitute(part, old, new)
            if changed is not part:
                return root.with_changes(**{name: changed})
        elif isinstance(part, list | tuple):
            for index, node in enumerate(part):
                others = new if node is old else [_substitute(node, old, new)]
                if [*others] != [node]:
                    parts = [*part[:index], *others, *part[index + 1 :]]
                    return root.with_changes(**{name: parts})
    return root


def _add_parameter(module: cst.Module, edit: AddParameter) -> cst.Module:
    function = _the_scope(module, edit.where)
    if not isinstance(function, cst.FunctionDef):
        raise Refused(f"{edit.where}: expected a function, found a class")
    old = function.params
    keyword_only = [*old.kwonly_params, _parameter(edit)]
    new = old.with_changes(kwonly_params=keyword_only)
    if not isinstance(old.star_arg, cst.Param | cst.ParamStar):
        new = new.with_changes(star_arg=cst.ParamStar())
    return _substitute(module, function, [function.with_changes(params=new)])


def _parameter(edit: AddParameter) -> cst.Param:
    function = cst.parse_statement(f"def f(*, {edit.code}): pass")
    assert isinstance(function, cst.FunctionDef)
    [parameter] = function.params.kwonly_params
    return parameter


def _parenthesised(
    module: cst.Module,
    around: cst.CSTNode,
    old: cst.CSTNode,
    new: cst.BaseExpression,
) -> cst.BaseExpression:
    """Return `new` in parentheses if it would fall apart without them."""
    safe = new.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    bare_tree, safe_tree = (
        _syntax_tree(module, _substitute(around, old, [expression]))
        for expression in (new, safe)
    )
    return new if _matches(safe_tree, bare_tree) else safe


def _insert_import(module: cst.Module, statement: Any) -> cst.Module:
    """Insert an import below the last one at the top; `diff` sorts them."""
    top = itertools.takewhile(
        lambda node: not isinstance(node, cst.FunctionDef | cst.ClassDef), module.body
    )
    imports = [
        index
        for index, node in enumerate(top)
        if isinstance(node, cst.SimpleStatementLine)
        and isinstance(node.body[0], cst.Import | cst.ImportFrom)
    ]
    if not imports:
        raise Refused("top of the file: expected imports, found none")
    last = imports[-1] + 1
    return module.with_changes(
        body=[*module.body[:last], statement, *module.body[last:]]
    )


def _code_of(edit: Insert | Replace | Enclose | AddParameter | AddArguments) -> str:
    return edit.new if isinstance(edit, Replace) else edit.code


def _one_line(code: str) -> str:
    return " ".join(code.split())
