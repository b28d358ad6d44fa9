# SPDX-License-Identifier: Apache-2.0
"""Makes of each pull request a branch of vLLM, a patch file and a text.

A branch starts from the current commit, or from the branch of the pull request that it
builds on, and has one commit: the edits, the new files and the tests.
"""

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from vllm_lean_vocab import description, diff, plan
from vllm_lean_vocab.edits import PullRequest
from vllm_lean_vocab.git import Branch, Lines, Repository

PREFIX = "lean-vocab/"
TEXT = "PULL_REQUEST.md"
KINDS = ("edits", "new_files", "tests")


class CantExport(Exception):
    """Nothing was written; says why, and what helps."""


class DoesNotApply(CantExport):
    """A pull request conflicts with this vLLM, or is upstream already."""


class Size(NamedTuple):
    """Lines that a pull request adds and removes."""

    added: int
    removed: int

    def __str__(self) -> str:
        return f"+{self.added} -{self.removed}"


class Exported(NamedTuple):
    """What was made of one pull request.

    Attributes:
        id: The pull request.
        branch: Name of its branch.
        commit: Its commit.
        parent: The commit before: the checkout's, or that of what it builds on.
        replaced: Where the branch pointed before, or empty.
        lines: What the commit changes, file by file.
        new_files: Those of them that are new to vLLM, without tests.
        warnings: What to look at before it is submitted.

    """

    id: str
    branch: str
    commit: str
    parent: str
    replaced: str
    lines: Sequence[Lines]
    new_files: Sequence[str]
    warnings: Sequence[str]

    def size(self, kind: str) -> Size:
        """Return lines added and removed in files of one kind.

        Args:
            kind: `edits` to vLLM's own files, `new_files` or `tests`.

        """
        lines = [each for each in self.lines if self._kind(each.path) == kind]
        return Size(sum(each.added for each in lines), sum(e.removed for e in lines))

    def _kind(self, path: str) -> str:
        if path.startswith("tests/"):
            return "tests"
        return "new_files" if path in self.new_files else "edits"

    def to_json(self) -> dict[str, Any]:
        """Return everything, ready for `json.dump`."""
        sizes = {kind: self.size(kind)._asdict() for kind in KINDS}
        lines = [each._asdict() for each in self.lines]
        return {**self._asdict(), **sizes, "lines": lines}


def export(
    pull_requests: Sequence[PullRequest],
    series: Sequence[PullRequest],
    *,
    checkout: Path | None = None,
    sources: Mapping[str, str | None] | None = None,
    out: Path | None = None,
    replace: bool = False,
) -> list[Exported]:
    """Export pull requests, all or none.

    Args:
        pull_requests: Those to export.
        series: All there are, in order.
        checkout: A git checkout of vLLM, in which branches are made.
        sources: Without a checkout: text of each of vLLM's files that
            `plan.source_paths` names, None where it has no such file.
        out: Folder in which patch files and texts are written, in a folder for each
            pull request.
        replace: Whether branches and files of an earlier export may be replaced.

    Raises:
        CantExport: Something is in the way: nothing was changed.
        GitFailed: Git can't do it: nothing was changed.
        NoFormatter: Ruff is missing.
        NoFigure: A measurement that a text names is missing.

    """
    with _repository(checkout, sources or {}) as (repository, base):
        old = repository.branches()
        if checkout is not None:
            _check_checkout(repository, pull_requests, old, replace)
        commits = _Commits(repository, base, series, old)
        commits.check_applying(pull_requests)
        made = [commits.export(each) for each in pull_requests]
        with _staging(out, pull_requests, replace) as staged:
            if staged is not None:
                for pull_request, each in zip(pull_requests, made):
                    _write(repository, pull_request, each, staged / each.id)
            if checkout is not None:
                branches = {each.branch: each.commit for each in made}
                repository.set_branches(branches, old, "vllm-lean-vocab export")
    return made


@contextmanager
def _repository(
    checkout: Path | None, sources: Mapping[str, str | None]
) -> Iterator[tuple[Repository, str]]:
    """Give the checkout, or a repository of the sources, and the commit to start at."""
    if checkout is not None:
        repository = Repository(checkout)
        repository.check_identity()
        yield repository, repository.head()
        return
    with tempfile.TemporaryDirectory() as folder:
        repository = Repository.create(Path(folder))
        repository.check_identity()
        files = {path: text for path, text in sources.items() if text is not None}
        yield repository, repository.commit(None, files, "vLLM's files\n")


def _check_checkout(
    repository: Repository,
    pull_requests: Sequence[PullRequest],
    there: Mapping[str, Branch],
    replace: bool,
) -> None:
    """Refuse a checkout in which something would be lost or left out."""
    root = repository.root
    if repository.read("HEAD", "vllm/__init__.py") is None:
        raise CantExport(f"{root}: not a checkout of vLLM (no vllm/__init__.py)")
    paths = [
        path
        for each in pull_requests
        for path in (*each.edited_paths, *each.new_files, *each.tests)
    ]
    if changes := repository.changes(paths):
        raise CantExport(
            f"{root} has changes that are not committed; commit or stash them first:\n"
            + "\n".join(f"  {line}" for line in changes[:10])
            + (f"\n  and {len(changes) - 10} more" if len(changes) > 10 else "")
        )
    taken = [name for each in pull_requests if (name := PREFIX + each.id) in there]
    if taken and not replace:
        raise CantExport(
            f"{root} has {', '.join(taken)} already; rename or delete, or add --replace"
        )
    for name in taken:
        if there[name].worktree:
            raise CantExport(
                f"{name} is checked out in {there[name].worktree}; "
                "switch to another branch there first"
            )


class _Commits:
    """The commits of pull requests, on top of those they build on."""

    def __init__(
        self,
        repository: Repository,
        base: str,
        series: Sequence[PullRequest],
        old: Mapping[str, Branch],
    ) -> None:
        self.repository = repository
        self.series = series
        self.old = old
        self.sources = {
            path: repository.read(base, path) for path in plan.source_paths(series)
        }
        self.made: dict[tuple[str, ...], str] = {(): base}
        self.plans: dict[tuple[str, ...], plan.Plan] = {}

    def export(self, pull_request: PullRequest) -> Exported:
        branch = f"{PREFIX}{pull_request.id}"
        old = self.old.get(branch)
        stack = self._stack(pull_request)
        commit, parent = self._commit(stack), self._commit(stack[:-1])
        warnings = [
            f"{path}: this vLLM has a file of that name, which the branch replaces"
            for path in pull_request.tests
            if self.repository.read(self.made[()], path) not in (None, _ours(path))
        ]
        return Exported(
            id=pull_request.id,
            branch=branch,
            commit=commit,
            parent=parent,
            replaced=old.commit if old and old.commit != commit else "",
            lines=self.repository.changed_lines(parent, commit),
            new_files=pull_request.new_files,
            warnings=warnings,
        )

    def check_applying(self, pull_requests: Sequence[PullRequest]) -> None:
        """Refuse them all if one does not apply, and say what is with each."""
        problems, rest = [], []
        for pull_request in pull_requests:
            *bases, own = self._plan([pull_request.id]).statuses
            if own.state == "applies":
                rest.append(own.id)
            elif own.state == "upstream":
                problems.append(f"{own.id}: upstream, this vLLM has it already")
            else:
                reasons = [s.reason for s in (own, *bases) if s.state == "conflict"]
                problems.append(f"{own.id}: conflict, {'; '.join(reasons)}")
        if problems:
            if rest:
                problems.append(f"To export the others, name them: {' '.join(rest)}")
            raise DoesNotApply("\n".join(["nothing was exported:", *problems]))

    def _stack(self, pull_request: PullRequest) -> tuple[str, ...]:
        """Return it and those it builds on, without what is upstream."""
        statuses = self._plan([pull_request.id]).statuses
        return tuple(s.id for s in statuses if s.state == "applies")

    def _commit(self, stack: tuple[str, ...]) -> str:
        if stack not in self.made:
            parent = self._commit(stack[:-1])
            [last] = (each for each in self.series if each.id == stack[-1])
            changed = self._plan(stack).changes(self._plan(stack[:-1]).files)
            files = {path: self._formatted(path, changed[path]) for path in changed}
            files |= {path: _ours(path) for path in last.tests}
            message = description.commit_message(last)
            commit = self.repository.commit(parent, files, message)
            # A branch that others may stand on stays where it is, if it is the same.
            old = self.old.get(f"{PREFIX}{last.id}")
            if old and self.repository.is_same(old.commit, commit):
                commit = old.commit
            self.made[stack] = commit
        return self.made[stack]

    def _plan(self, ids: Sequence[str]) -> plan.Plan:
        wanted = plan.with_bases(ids, self.series)
        pull_requests = [each for each in self.series if each.id in wanted]
        key = tuple(each.id for each in pull_requests)
        if key not in self.plans:
            self.plans[key] = plan.make_plan(self.sources, pull_requests)
        return self.plans[key]

    def _formatted(self, path: str, text: str) -> str:
        stock = self.sources.get(path)
        if stock is not None and diff.formatted(path, stock) != stock:
            raise CantExport(
                f"{path} is not formatted as ruff does, so the branch would change "
                "lines that have nothing to do with it; format and commit it first"
            )
        return diff.formatted(path, text)


@cache
def _ours(path: str) -> str:
    return plan.repository_file(path).read_text(encoding="utf-8")


def _write(
    repository: Repository, pull_request: PullRequest, made: Exported, folder: Path
) -> None:
    folder.mkdir()
    repository.format_patch(made.commit, folder)
    title = f"<!-- Title: {pull_request.title} -->\n"
    text = title + description.body(pull_request)
    (folder / TEXT).write_text(text, encoding="utf-8")


@contextmanager
def _staging(
    out: Path | None, pull_requests: Sequence[PullRequest], replace: bool
) -> Iterator[Path | None]:
    """Give a folder whose folders take their places when all has gone well."""
    if out is None:
        yield None
        return
    folders = [out / each.id for each in pull_requests]
    for target in folders:
        _check_replaceable(target, replace)
    is_new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=out, prefix=".") as name:
            yield Path(name)
            for target in folders:
                if target.exists():
                    shutil.rmtree(target)
                Path(name, target.name).rename(target)
    except BaseException:
        if is_new and not list(out.iterdir()):
            out.rmdir()
        raise


def _check_replaceable(folder: Path, replace: bool) -> None:
    """Refuse a folder in which something would be lost."""
    if not folder.exists():
        return
    if not replace:
        raise CantExport(f"{folder} is there already; remove it, or add --replace")
    for path in folder.iterdir():
        if path.name != TEXT and path.suffix != ".patch":
            raise CantExport(f"{path} is not from an export; move it elsewhere first")
