# SPDX-License-Identifier: Apache-2.0
"""What a pull request is made of. How edits are carried out stands in `rewrite`.

Places are addressed by structure: `where` is the dotted name of a class or function in
the file, and a place within it is given as Python code that must match there exactly
once, layout and comments aside. In such a pattern `...` stands for any expression, and
as the only argument of a call for any arguments.

Importing this module or a pull request does not import LibCST, and takes little time:
each of vLLM's processes does it. Named tuples are quicker to define than dataclasses.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Refused(Exception):
    """An edit does not match exactly one place; says file, place and what was found."""


class Insert(NamedTuple):
    """Inserts statements before or after one statement, or imports at the top.

    Attributes:
        where: Class or function, e.g. `SpecDecodeBaseProposer.load_model`; empty for
            the top of the file: then `code` is one `from ... import ...`.
        code: The statements.
        before: Pattern of the statement that they are to precede.
        after: Pattern of the statement that they are to follow.

    """

    where: str
    code: str
    before: str = ""
    after: str = ""


class Replace(NamedTuple):
    """Replaces one expression within one statement or expression.

    Attributes:
        where: Class or function that holds it.
        within: Pattern of the statement or expression around it.
        old: Pattern of the expression.
        new: The expression that takes its place.

    """

    where: str
    within: str
    old: str
    new: str


class Enclose(NamedTuple):
    """Puts one statement into a `with` statement, or adds to one that holds it alone.

    Attributes:
        where: Class or function that holds it.
        statement: Pattern of the statement.
        code: The context manager, e.g. `lock`.

    """

    where: str
    statement: str
    code: str


class Remove(NamedTuple):
    """Removes a class or function; `diff` then removes imports that nothing uses.

    Attributes:
        where: The class or function.

    """

    where: str


class AddParameter(NamedTuple):
    """Adds a keyword-only parameter to a function.

    Attributes:
        where: The function.
        code: The parameter, e.g. `strict: bool = False`.

    """

    where: str
    code: str


class AddArguments(NamedTuple):
    """Adds keyword arguments to a call.

    Attributes:
        where: Class or function that holds it.
        call: Pattern of the call, with the arguments that it has.
        code: The arguments, e.g. `strict=True, name=name`.

    """

    where: str
    call: str
    code: str


Edit = Insert | Replace | Enclose | Remove | AddParameter | AddArguments


class In:
    """Edits to one of vLLM's files, carried out in order.

    Attributes:
        path: The file, from the root of vLLM's repository.
        edits: What to change in it.

    """

    def __init__(self, path: str, *edits: Edit) -> None:
        self.path = path
        self.edits = edits


class Has(NamedTuple):
    """A statement by which a vLLM shows that it has a pull request's change already.

    Attributes:
        path: The file, from the root of vLLM's repository.
        where: Class or function.
        statement: Pattern of the statement.

    """

    path: str
    where: str
    statement: str


class Variant(NamedTuple):
    """Edits for one of several states that vLLM is found in.

    Attributes:
        vllm: That state, as `status` shows it.
        edits: Edits that fit it, and none of the other states.

    """

    vllm: str
    edits: Sequence[In]


class PullRequest(NamedTuple):
    """One pull request.

    Attributes:
        id: Its name here, in `VLLM_LEAN_VOCAB` and on the command line.
        title: Title for upstream.
        edits: Edits to files that vLLM has.
        variants: More edits, where vLLM's releases differ: just one variant must fit.
        new_files: Files that are new to vLLM, as they stand in this repository.
        tests: Test files that go upstream with it, as they stand in this repository.
        builds_on: Ids of earlier pull requests that it needs.
        upstream_if: Any of these in vLLM's own source: it has the change in another
            shape. The same shape is recognised without being told.

    """

    id: str
    title: str
    edits: Sequence[In]
    variants: Sequence[Variant] = ()
    new_files: Sequence[str] = ()
    tests: Sequence[str] = ()
    builds_on: Sequence[str] = ()
    upstream_if: Sequence[Has] = ()

    @property
    def edited_paths(self) -> list[str]:
        """The files of vLLM that it edits, in any variant."""
        groups = [self.edits, *(variant.edits for variant in self.variants)]
        return sorted({edits.path for group in groups for edits in group})
