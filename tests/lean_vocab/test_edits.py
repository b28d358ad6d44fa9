# SPDX-License-Identifier: Apache-2.0
"""The edits, on small source texts: exact, or refused with a reason."""

import ast
import difflib
import re

import pytest

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
from vllm_lean_vocab.names import check_names
from vllm_lean_vocab.outline import restore, shorten
from vllm_lean_vocab.rewrite import apply_edits, has_statement

PATH = "vllm/some/file.py"

SOURCE = '''\
# A licence line.
"""A docstring."""

from collections import abc   # odd   spacing
import os

from .tables import (
    Table,  # trailing comment
    maybe,
)

if os.name:
    import late


class Outer( object ):   # layout no formatter would leave

    x = {'single':1,
         "double" : 2}

    def build(self, size, *, flag = False):
        # before the table
        self.table = Table(size,
                           size)  # after the table
        self.other = Table(size, 1)
        if flag :
            use(flag)
        return [name for name in self.x if name in "abc"]

    class Inner:
        def build(self):
            y = "inner"
            return y


def build(size):
    def helper():
        z = size
        return z

    z = helper()
    return z
'''


def edited(*edits: Edit, source: str = SOURCE) -> str:
    text, present = apply_edits(source, In(PATH, *edits))
    assert not present
    ast.parse(text)
    return text


def refusal(*edits: Edit, source: str = SOURCE) -> str:
    with pytest.raises(Refused) as refused:
        apply_edits(source, In(PATH, *edits))
    assert PATH in str(refused.value)
    return str(refused.value)


def changes(new: str, old: str = SOURCE) -> list[str]:
    """Return the changed lines, `-` old and `+` new, without those around them."""
    lines = difflib.ndiff(old.splitlines(keepends=True), new.splitlines(keepends=True))
    return [line.rstrip("\n") for line in lines if line[0] in "+-"]


# ------------------------------------------------------------------------ inserting


def test_insert_after() -> None:
    new = edited(
        Insert("Outer.build", "note(self)", after="self.table = Table(size, size)")
    )
    assert changes(new) == ["+         note(self)"]
    assert new.index("# after the table") < new.index("note(self)")
    assert new.index("note(self)") < new.index("self.other")


def test_insert_before_leaves_comments_with_their_statement() -> None:
    new = edited(
        Insert("Outer.build", "note(self)", before="self.table = Table(size, size)")
    )
    assert changes(new) == ["+         note(self)"]
    assert new.index("note(self)") < new.index("# before the table")


def test_insert_several_statements_in_order() -> None:
    code = """
        first = 1
        if first:
            second = first
        """
    new = edited(Insert("Outer.Inner.build", code, before="return y"))
    assert changes(new) == [
        "+             first = 1",
        "+             if first:",
        "+                 second = first",
    ]


def test_insert_into_a_nested_block() -> None:
    new = edited(Insert("Outer.build", "note()", before="use(flag)"))
    assert changes(new) == ["+             note()"]


def test_import_goes_below_the_last_import_at_the_top() -> None:
    new = edited(Insert("", "\n    from .deferred import Deferred\n"))
    assert changes(new) == ["+ from .deferred import Deferred"]
    assert new.index("maybe,\n)") < new.index(".deferred") < new.index("if os.name")


def test_import_into_a_file_without_imports_is_refused() -> None:
    message = refusal(Insert("", "from a import b"), source="x = 1\n")
    assert "top of the file" in message
    assert "found none" in message


# ------------------------------------------------------------------------ replacing


def test_replace_within_one_statement() -> None:
    new = edited(
        Replace(
            "Outer.build",
            "self.table = Table(...)",
            "Table",
            "maybe(Table, group())",
        )
    )
    # The layout of the arguments stays as it was.
    assert changes(new) == [
        "-         self.table = Table(size,",
        "+         self.table = maybe(Table, group())(size,",
    ]


def test_replace_within_one_expression() -> None:
    new = edited(Replace("Outer", "name in 'abc'", "'abc'", "letters"))
    assert changes(new) == [
        '-         return [name for name in self.x if name in "abc"]',
        "+         return [name for name in self.x if name in letters]",
    ]


PRECEDENCE = [
    # What was there, and what `a` becomes; in parentheses where it needs them.
    ("x = not a", "b or c", "x = not (b or c)"),
    ("x = a * 2", "b + c", "x = (b + c) * 2"),
    ("x = 2 - a", "b - c", "x = 2 - (b - c)"),
    ("x = a ** 2", "-b", "x = (-b) ** 2"),
    ("x = a < 2", "b < c", "x = (b < c) < 2"),
    ("x = a.attribute", "b or c", "x = (b or c).attribute"),
    ("x = a[0]", "b + c", "x = (b + c)[0]"),
    ("x = a()", "lambda: b", "x = (lambda: b)()"),
    ("x = a()", "b if c else d", "x = (b if c else d)()"),
    ("x = f(a)", "b, c", "x = f((b, c))"),
    ("x = f(*a)", "b or c", "x = f(*b or c)"),
    ("x = [y for y in a]", "b if c else d", "x = [y for y in (b if c else d)]"),
    ("x = [y for y in z if a]", "b and c", "x = [y for y in z if b and c]"),
    ("x = a", "b or c", "x = b or c"),
    ("x = (a)", "b or c", "x = b or c"),
    ("x = a + 2", "b * c", "x = b * c + 2"),
    ("x = a or y", "b and c", "x = b and c or y"),
    ("x = f(a, k=2)", "b or c", "x = f(b or c, k=2)"),
    ("x = f(k=a)", "b if c else d", "x = f(k=b if c else d)"),
    ("x = y[a]", "b or c", "x = y[b or c]"),
    ("x = f'{a}'", "b or c", "x = f'{b or c}'"),
    ("assert a, 'no'", "b and c", "assert b and c, 'no'"),
    ("return a", "b, c", "return b, c"),
]


@pytest.mark.parametrize(("line", "new", "expected"), PRECEDENCE)
def test_parentheses_where_precedence_asks_for_them(
    line: str, new: str, expected: str
) -> None:
    text = edited(
        Replace("f", line, "a", new), source=f"def f():\n    {line}  # note\n"
    )
    assert text == f"def f():\n    {expected}  # note\n"
    # The same tree as with parentheses in any case.
    always = re.sub(r"\ba\b", lambda _: f"({new})", line)
    assert ast.dump(ast.parse(expected)) == ast.dump(ast.parse(always))


def test_replacing_does_not_touch_the_same_text_elsewhere() -> None:
    source = "def f():\n    x = g(a)\n    y = g(a)\n\n\ndef h():\n    x = g(a)\n"
    new = edited(Replace("f", "x = g(a)", "a", "b"), source=source)
    assert new == source.replace("g(a)", "g(b)", 1)


# ------------------------------------------------------------------------- patterns


@pytest.mark.parametrize(
    "pattern",
    [
        "self.x = {'single': 1, \"double\": 2}",
        "self.x={ 'single':1,'double':2, }",
        "self.x = {...: 1, 'double': ...}",
        "self.x = ...",
    ],
)
def test_layout_comments_and_quotes_do_not_count(pattern: str) -> None:
    source = """\
def f(self):
    self.x = {  # comment
        'single' :   1,

        "double": (2),
    }  # comment
    other()
"""
    new = edited(Insert("f", "here()", after=pattern), source=source)
    assert new == source.replace("    other()", "    here()\n    other()")


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("f(...)", 4),  # as the only argument: any arguments, none too
        ("f(..., ...)", 1),
        ("f(..., k=1)", 1),
        ("f(1, ...)", 1),
        ("f(1)", 1),
        ("g(...)", 0),
        ("self.f(...)", 0),
        ("...(...)", 5),
        ("f", 0),
    ],
)
def test_wildcards(pattern: str, count: int) -> None:
    source = """\
def scope(self):
    f()
    f(1)
    f(1, 2)
    f(0, k=1)
    o.f(*a, **k)
"""
    edit = Insert("scope", "here()", before=pattern)
    if count == 1:
        assert "here()" in edited(edit, source=source)
    else:
        assert f"found {count}" in refusal(edit, source=source)


def test_names_of_attributes_keywords_and_parameters_are_not_expressions() -> None:
    source = """\
def f(name=0):
    x = o.name(name=name, other=o.name)
    import name as name
"""
    new = edited(Replace("f", "x = o.name(...)", "name", "title"), source=source)
    assert new == source.replace("name=name", "name=title")


def test_the_module_of_an_import_is_not_an_expression() -> None:
    source = "def f():\n    from name import x\n"
    refusal(Replace("f", "from name import x", "name", "title"), source=source)


def test_a_statement_that_is_a_call_is_one_place() -> None:
    source = "def f():\n    g(a)\n"
    new = edited(Replace("f", "g(a)", "a", "b"), source=source)
    assert new == source.replace("(a)", "(b)")


def test_numbers_and_truth_values_are_told_apart() -> None:
    source = "def f():\n    x = True\n"
    refusal(Insert("f", "here()", after="x = 1"), source=source)


def test_statements_that_share_a_line_are_not_matched_by_the_first() -> None:
    source = "def f():\n    x = 1; y = 2\n"
    refusal(Insert("f", "here()", after="x = 1"), source=source)


# --------------------------------------------------------------------------- places


def test_definitions_are_addressed_by_their_full_name() -> None:
    assert changes(
        edited(Insert("Outer.Inner.build", "here()", before="return y"))
    ) == ["+             here()"]
    assert changes(edited(Insert("build.helper", "here()", before="return z"))) == [
        "+         here()"
    ]
    assert "found 0" in refusal(Insert("Inner.build", "here()", before="return y"))


def test_a_definition_holds_those_inside_it() -> None:
    # `return z` stands in `build` and in `build.helper`.
    message = refusal(Insert("build", "here()", before="return z"))
    assert "build: expected one match of `return z`, found 2" in message
    assert "here()" in edited(Insert("build", "here()", before="z = helper()"))


def test_a_definition_below_a_condition_is_found() -> None:
    source = "if x:\n    def f():\n        y = 1\nelse:\n    z = 2\n"
    new = edited(Insert("f", "here()", after="y = 1"), source=source)
    assert new == source.replace("y = 1", "y = 1\n        here()")


@pytest.mark.parametrize(
    ("where", "found"),
    [("Missing", 0), ("Outer.missing", 0), ("Outer.Inner.build.deeper", 0)],
)
def test_missing_definition(where: str, found: int) -> None:
    for edit in (
        Insert(where, "here()", before="return y"),
        Replace(where, "return y", "y", "x"),
    ):
        message = refusal(edit)
        assert f"{where}: expected one definition, found {found}" in message


def test_doubled_definition() -> None:
    source = SOURCE + "\n\nif more:\n    def build():\n        pass\n"
    message = refusal(Insert("build", "here()", before="return z"), source=source)
    assert "build: expected one definition, found 2" in message


@pytest.mark.parametrize("side", ["before", "after"])
def test_missing_and_doubled_anchors(side: str) -> None:
    for pattern, found in (("absent(1)", 0), ("return ...", 2)):
        message = refusal(Insert("Outer", "here()", **{side: pattern}))
        assert f"Outer: expected one match of `{pattern}`, found {found}" in message


def test_missing_and_doubled_replacements() -> None:
    twice = "self.table = Table(size, size)"
    for within, old, pattern, found in (
        ("self.gone = Table(...)", "Table", "self.gone = Table(...)", 0),
        ("Table(...)", "Table", "Table(...)", 2),
        (twice, "absent", "absent", 0),
        (twice, "size", "size", 2),
    ):
        message = refusal(Replace("Outer.build", within, old, "new"))
        expected = f"Outer.build: expected one match of `{pattern}`, found {found}"
        assert expected in message


def test_a_refused_edit_refuses_those_before_it() -> None:
    refusal(
        Insert("Outer.build", "here()", before="use(flag)"),
        Insert("Outer.build", "there()", before="absent()"),
    )


def test_a_file_that_is_not_python_is_refused() -> None:
    message = refusal(Insert("f", "here()", after="x = 1"), source="def f(:\n")
    assert "can't be parsed" in message


def test_edits_that_leave_no_python_are_refused() -> None:
    # Before Python 3.12 an f-string can't hold its own quotes.
    source = "def f():\n    x = f'{a}'\n"
    edits = In(PATH, Replace("f", "x = f'{a}'", "a", "print('b')"))
    try:
        text, _ = apply_edits(source, edits)
    except Refused:
        return
    ast.parse(text)


# ------------------------------------------------------ definitions and parameters


def test_enclose_a_statement() -> None:
    managers = "lock(self), other"
    new = edited(Enclose("Outer.build", "self.table = Table(size, size)", managers))
    assert set(changes(new)) == {
        "-         self.table = Table(size,",
        "-                            size)  # after the table",
        "+         with lock(self), other:",
        "+             self.table = Table(size,",
        "+                                size)  # after the table",
    }
    assert "# before the table\n        with lock(self), other:" in new
    for managers, there in (("lock(self), other", True), ("lock(self)", False)):
        again = Enclose("Outer.build", "self.table = Table(...)", managers)
        assert apply_edits(new, In(PATH, again))[1] is there


def test_enclose_what_a_with_holds_alone() -> None:
    """Nested `with` statements would be one too many for vLLM's checks."""
    first, second = (
        Enclose("Outer.build", "self.table = Table(...)", code)
        for code in ("lock(self)", "other as it")
    )
    new = edited(first, second)
    assert "        with lock(self), other as it:\n            self.table" in new
    assert apply_edits(new, In(PATH, second))[1]
    assert not apply_edits(new, In(PATH, first))[1]


def test_enclose_what_is_not_there() -> None:
    message = refusal(Enclose("Outer.build", "self.table = None", "lock"))
    assert "expected one match of `self.table = None`, found 0" in message


def test_remove_a_definition() -> None:
    new = edited(Remove("Outer.Inner"))
    assert not [line for line in changes(new) if line.startswith("+")]
    assert "class Inner" not in new and "inner" not in new
    assert "class Outer( object ):   # layout" in new and "def build(size):" in new
    new = edited(Remove("Outer"))
    assert new.endswith("import late\n\n\n" + SOURCE[SOURCE.index("def build(size)") :])


@pytest.mark.parametrize("where", ["Missing", "Outer.helper", "Outer.Inner.missing"])
def test_remove_what_is_not_there(where: str) -> None:
    insert = Insert("Outer.build", "note()", before="self.other = Table(...)")
    message = refusal(Remove(where), insert)
    assert f"{where}: expected one definition, found 0" in message


def test_remove_one_of_two() -> None:
    source = SOURCE.replace("class Inner", "class Outer").replace("def build", "def f")
    source += "\n\ndef build():\n    pass\n\n\ndef build():\n    pass\n"
    message = refusal(Remove("build"), source=source)
    assert "build: expected one definition, found 2" in message


@pytest.mark.parametrize(
    ("signature", "expected"),
    [
        ("self", "self, *, strict: bool = False"),
        ("self, size=1", "self, size=1, *, strict: bool = False"),
        ("self, size=1,\n      ", "self, size=1, *, strict: bool = False"),
        ("self, *sizes", "self, *sizes, strict: bool = False"),
        ("self, *, flag", "self, *, flag, strict: bool = False"),
        ("self, /, **more", "self, /, *, strict: bool = False, **more"),
    ],
)
def test_add_parameter(signature: str, expected: str) -> None:
    source = f"import os\n\n\nclass A:\n    def f({signature}) -> None:\n        pass\n"
    add = AddParameter("A.f", "strict: bool = False")
    text = edited(add, source=source)
    [arguments] = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.arguments)]
    [wanted] = [
        n
        for n in ast.walk(ast.parse(f"def f({expected}): pass"))
        if isinstance(n, ast.arguments)
    ]
    assert ast.dump(arguments) == ast.dump(wanted)
    assert apply_edits(text, In(PATH, add)) == (text, True)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("Table(size, 1)", "self.other = Table(size, 1, strict=True, name=size)"),
        ("...(size, 1)", "self.other = Table(size, 1, strict=True, name=size)"),
        ("use(...)", "use(flag, strict=True, name=size)"),
    ],
)
def test_add_arguments(call: str, expected: str) -> None:
    add = AddArguments("Outer.build", call, "strict=True, name=size")
    text = edited(add)
    assert [line[2:].strip() for line in changes(text) if line[0] == "+"] == [expected]
    assert apply_edits(text, In(PATH, add)) == (text, True)


def test_add_arguments_to_what_is_not_there_or_twice() -> None:
    add = AddArguments("Outer.build", "Table(size, 2)", "strict=True")
    assert "one match of `Table(size, 2)`, found 0" in refusal(add)
    add = AddArguments("Outer.build", "Table(...)", "strict=True")
    assert "one match of `Table(...)`, found 2" in refusal(add)


def test_add_a_parameter_to_a_class() -> None:
    message = refusal(AddParameter("Outer", "strict: bool = False"))
    assert "Outer: expected a function, found a class" in message


# -------------------------------------------------------------------- already there

EDITS = (
    Insert("", "from .deferred import Deferred, check"),
    Insert("Outer.build", "check(self)", after="self.other = Table(...)"),
    Replace("Outer.build", "self.table = Table(...)", "Table", "maybe(Table)"),
    Enclose("Outer.Inner.build", "y = 'inner'", "lock"),
)


def test_the_whole_edit_is_recognised() -> None:
    text = edited(*EDITS)
    assert apply_edits(text, In(PATH, *EDITS)) == (text, True)
    # Also in a layout of its own.
    other = text.replace("check(self)", "check( self )  # note")
    assert apply_edits(other, In(PATH, *EDITS)) == (other, True)


@pytest.mark.parametrize("there", range(len(EDITS)))
def test_half_an_edit_is_refused(there: int) -> None:
    message = refusal(*EDITS, source=edited(EDITS[there]))
    assert "some of the change is there already" in message
    assert (EDITS[there].where or "top of the file") in message


def test_has_statement() -> None:
    assert has_statement(
        SOURCE, Has(PATH, "Outer.build", "self.table = Table(size, size)")
    )
    assert has_statement(SOURCE, Has(PATH, "Outer", "return 'inner'")) is False
    assert has_statement(SOURCE, Has(PATH, "Outer", "y = 'inner'"))
    assert not has_statement(
        SOURCE, Has(PATH, "Outer.Inner", "self.table = Table(...)")
    )
    assert not has_statement(SOURCE, Has(PATH, "Missing", "self.table = Table(...)"))


def test_names_that_a_change_uses() -> None:
    before = "import os\n\n\ndef f(a):\n    return g(a, os)\n"
    with pytest.raises(Refused, match=f"^{PATH}: .* not there: h$"):
        check_names(PATH, before, before.replace("(a, os)", "(h(a), os)"))
    # `g` was missing before; locals, builtins and what is imported are there.
    for a in ("len([b for b in (a, os)])", "(lambda b: b)(a)", "a.h"):
        check_names(PATH, before, before.replace("(a, os)", f"({a}, os)"))
    after = "from m import h\n" + before.replace("(a, os)", "(h(a), os)")
    check_names(PATH, before, after)


BODIES = '''\
import os

def one_line(): return 1

if os.name:
    async def late(
        argument,
    ):  # why
        # before
        @property
        def inner():
            return """
left in: none of this
"""
        return inner  # after
    # below

class Outer:
    def first(self):
        "docstring"

    class Inner:
        def method(self):
            return 1; return 2

        def other(self):
            pass
'''


@pytest.mark.parametrize(
    ("wheres", "left_out"),
    [
        ([], ["late", "first", "method", "other"]),
        (["late.inner"], ["first", "method", "other"]),
        (["Outer.Inner.method"], ["late", "first", "other"]),
        (["Outer.Inner"], ["late", "first"]),
        (["Outer", "one_line"], ["late"]),
        (["Out", "lat"], ["late", "first", "method", "other"]),
        ([""], []),
    ],
)
def test_functions_that_no_edit_looks_into(
    wheres: list[str], left_out: list[str]
) -> None:
    outline, bodies = shorten(BODIES, wheres)
    assert len(bodies) == len(left_out)
    defined = {"late": "@property", "first": "docstring"}
    defined |= {"method": "return 1;", "other": "pass"}
    gone = [name for name, body in defined.items() if body not in outline]
    assert gone == left_out
    assert "# before" in outline and "# below" in outline
    ast.parse(outline)
    assert restore(outline, bodies) == BODIES


@pytest.mark.parametrize("source", ["def f(:\n", "def f():\r\n    pass\r\n"])
def test_what_cannot_be_shortened(source: str) -> None:
    assert shorten(source, []) == (source, {})


def test_an_edit_keeps_the_functions_around_it() -> None:
    edit = Insert("Outer.Inner.other", "x = 1", before="pass")
    text, _ = apply_edits(BODIES, In(PATH, edit, Remove("Outer.first")))
    expected = BODIES.replace('    def first(self):\n        "docstring"\n', "")
    inserted = "            x = 1\n            pass\n"
    assert text == expected.replace("            pass\n", inserted)


def test_one_of_two_classes_of_a_name_is_refused() -> None:
    source = "class A:\n    pass\n\nclass A:\n    def f(self):\n        x = 1\n"
    edit = Insert("A.f", "y = 2", after="x = 1")
    with pytest.raises(Refused, match="A: expected one definition, found 2"):
        apply_edits(source, In(PATH, edit))
