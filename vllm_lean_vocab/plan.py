# SPDX-License-Identifier: Apache-2.0
"""Decides which pull requests apply to a vLLM, and what its files become."""

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from vllm_lean_vocab.edits import In, PullRequest, Refused, Variant

# Not parsed: this is done at every start.
IMPORT = re.compile(r"^\s*from (vllm[\w.]*) import ", re.MULTILINE)

State = Literal["applies", "upstream", "conflict"]

_HERE = Path(__file__).resolve().parent
# An installed package carries vLLM's new files as data; a checkout has them beside it.
_REPOSITORY = _HERE / "repository"
if not _REPOSITORY.is_dir():
    _REPOSITORY = _HERE.parent


class Status(NamedTuple):
    """What became of one pull request.

    Attributes:
        id: The pull request.
        state: `applies`, `upstream` (this vLLM has it already) or `conflict`.
        reason: Why, for a conflict; else empty.
        variant: The state that this vLLM is in, where the pull request tells several.

    """

    id: str
    state: State
    reason: str = ""
    variant: str = ""


class Plan(NamedTuple):
    """The outcome for one vLLM.

    Attributes:
        statuses: One for each pull request that was asked for, in order.
        files: New text of each file that is changed or new, by its path from the root
            of vLLM's repository.

    """

    statuses: Sequence[Status]
    files: Mapping[str, str]

    def ids(self, state: State) -> list[str]:
        """Return the ids of the pull requests in a state."""
        return [status.id for status in self.statuses if status.state == state]

    def changes(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return the files that are not as in another plan's `files`."""
        return {
            path: text for path, text in self.files.items() if base.get(path) != text
        }


def repository_file(path: str) -> Path:
    """Return where a file of this project's repository lies in this installation."""
    return _REPOSITORY / path


def source_paths(pull_requests: Sequence[PullRequest]) -> list[str]:
    """Return the files of vLLM that decide what becomes of the pull requests.

    Of a module that is imported these are both places where its file may be.
    """
    paths: set[str] = set()
    for pull_request in pull_requests:
        paths.update(pull_request.edited_paths, pull_request.new_files)
        paths.update(has.path for has in pull_request.upstream_if)
        for path in pull_request.new_files:
            paths.update(_imported(repository_file(path).read_text(encoding="utf-8")))
    return sorted(paths)


def _imported(text: str) -> Iterator[str]:
    for module in IMPORT.findall(text):
        stem = module.replace(".", "/")
        yield from (f"{stem}.py", f"{stem}/__init__.py")


def read_sources(
    root: Path, pull_requests: Sequence[PullRequest]
) -> dict[str, str | None]:
    """Return the text of every file that `source_paths` names, None where none is.

    Args:
        root: Folder that holds the folder `vllm`.
        pull_requests: Those that are of interest.

    """
    sources: dict[str, str | None] = {}
    for path in source_paths(pull_requests):
        try:
            sources[path] = (root / path).read_text(encoding="utf-8")
        except FileNotFoundError:
            sources[path] = None
    return sources


def with_bases(ids: Collection[str], series: Sequence[PullRequest]) -> set[str]:
    """Return the ids and those of all pull requests that they build on."""
    wanted = set(ids)
    for pull_request in reversed(series):
        if pull_request.id in wanted:
            wanted.update(pull_request.builds_on)
    return wanted


def make_plan(
    sources: Mapping[str, str | None], pull_requests: Sequence[PullRequest]
) -> Plan:
    """Try each pull request on top of those before it, whole or not at all.

    Args:
        sources: Text of every file that `source_paths` names, None where vLLM has no
            such file.
        pull_requests: In the order of the series.

    """
    files: dict[str, str] = {}
    statuses: dict[str, Status] = {}
    for pull_request in pull_requests:
        try:
            changed, variant = _try(pull_request, {**sources, **files}, statuses)
        except Refused as error:
            status = Status(pull_request.id, "conflict", reason=str(error))
        else:
            state: State = "applies" if changed else "upstream"
            status = Status(pull_request.id, state, variant=variant if changed else "")
            files.update(changed)
        statuses[pull_request.id] = status
    return Plan(tuple(statuses.values()), files)


def _try(
    pull_request: PullRequest,
    sources: Mapping[str, str | None],
    statuses: Mapping[str, Status],
) -> tuple[dict[str, str], str]:
    """Return the files as changed, none where the change is there, and the variant."""
    from vllm_lean_vocab import names, rewrite  # late: they are of no use when warm

    for has in pull_request.upstream_if:
        source = sources.get(has.path)
        if source and rewrite.has_statement(source, has):
            return {}, ""
    for base in pull_request.builds_on:
        if base not in statuses or statuses[base].state == "conflict":
            raise Refused(f"builds on {base}, which is not applied")

    edits, variant = [*pull_request.edits], ""
    changed, present = _edited(edits, sources)
    if pull_request.variants:
        fitting, more, more_present = _the_variant(pull_request.variants, sources)
        edits, variant = [*edits, *fitting.edits], fitting.vllm
        changed, present = {**changed, **more}, {**present, **more_present}
    for path in pull_request.new_files:
        present[path] = sources.get(path) is not None
        changed[path] = repository_file(path).read_text(encoding="utf-8")
    if all(present.values()):
        return {}, ""
    texts = {**sources, **changed}
    for each in edits:
        names.check_imports(each.path, names.inserted_statements(each), texts)
    for path in pull_request.new_files:
        names.check_imports(path, ast.walk(ast.parse(changed[path])), texts)
    there = [path for path, is_there in present.items() if is_there]
    if there:
        raise Refused(f"{there[0]}: the change is there already, elsewhere it isn't")
    return changed, variant


def _edited(
    edits: Iterable[In], sources: Mapping[str, str | None]
) -> tuple[dict[str, str], dict[str, bool]]:
    """Return the files as changed, and of each whether the change was there already."""
    from vllm_lean_vocab import names, rewrite

    changed: dict[str, str] = {}
    present: dict[str, bool] = {}
    for each in edits:
        source = sources.get(each.path)
        if source is None:
            raise Refused(f"{each.path}: this vLLM has no such file")
        changed[each.path], present[each.path] = rewrite.apply_edits(source, each)
        names.check_names(each.path, source, changed[each.path])
    return changed, present


def _the_variant(
    variants: Sequence[Variant], sources: Mapping[str, str | None]
) -> tuple[Variant, dict[str, str], dict[str, bool]]:
    """Return the variant that fits, and what its edits give."""
    fitting, reasons = [], []
    for variant in variants:
        try:
            fitting.append((variant, *_edited(variant.edits, sources)))
        except Refused as error:
            reasons.append(f"[{variant.vllm}] {error}")
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        states = ", ".join(variant.vllm for variant, *_ in fitting)
        raise Refused(f"this vLLM is in several states: {states}")
    raise Refused(f"this vLLM is in no state that is known: {'; '.join(reasons)}")
