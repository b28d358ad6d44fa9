# SPDX-License-Identifier: Apache-2.0
"""The text of a pull request, with figures from files that measurements wrote.

It stands beside the pull request's module, as `series/<id>.md`. `${demo.date}` in it is
the entry `date` of `benchmarks/results/demo.json`, `${a.b.c:,.1f}` one that is further
down and formatted as Python does; `$$` is a dollar sign. `${tests}` are the pull
request's own tests. The section Purpose is the commit's message, too.
"""

import json
import string
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from vllm_lean_vocab.edits import PullRequest
from vllm_lean_vocab.plan import repository_file

_SERIES = Path(__file__).with_name("series")
RESULTS = "benchmarks/results"


class NoFigure(Exception):
    """A text names a figure that no file has; says which, and what writes it."""


def commit_message(pull_request: PullRequest) -> str:
    """Return title and purpose.

    Raises:
        NoFigure: A figure in the purpose is missing.

    """
    purpose = _text(pull_request.id).partition("## Purpose\n")[2].partition("\n## ")[0]
    return f"{pull_request.title}\n\n{_filled(pull_request, purpose).strip()}\n"


def body(pull_request: PullRequest) -> str:
    """Return the whole text, in Markdown.

    Raises:
        NoFigure: A figure is missing.

    """
    text = f"{_text(pull_request.id).rstrip()}\n\n{_text('closing')}"
    return _filled(pull_request, text)


def _text(name: str) -> str:
    return (_SERIES / f"{name}.md").read_text(encoding="utf-8")


def _filled(pull_request: PullRequest, text: str) -> str:
    return _Template(text).substitute(_Figures(pull_request))


class _Template(string.Template):
    braceidpattern = r"\w+(?:\.\w+)*(?::[^{}]+)?"


class _Figures(Mapping[str, str]):
    def __init__(self, pull_request: PullRequest) -> None:
        self.pull_request = pull_request

    def __getitem__(self, name: str) -> str:
        path, _, format_spec = name.partition(":")
        if path == "tests":
            return " ".join(self.pull_request.tests)
        file, *keys = path.split(".")
        found = _results(file)
        for key in keys:
            if not isinstance(found, dict) or key not in found:
                raise NoFigure(
                    f"the text of {self.pull_request.id} names {path}, which "
                    f"{RESULTS}/{file}.json doesn't have"
                )
            found = found[key]
        return format(found, format_spec)

    def __iter__(self) -> Iterator[str]:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError


@cache
def _results(name: str) -> Any:
    path = repository_file(f"{RESULTS}/{name}.json")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NoFigure(
            f"{path} is missing, and pull request texts have figures from it; "
            "`make bench` or `make prs` in a clone of vllm-lean-vocab writes it"
        ) from None
