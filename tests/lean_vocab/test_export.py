# SPDX-License-Identifier: Apache-2.0
"""Branches, patch files and texts, made with the real git."""

import json
import re
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from vllm_lean_vocab import description, diff, plan
from vllm_lean_vocab.edits import In, Insert, PullRequest
from vllm_lean_vocab.export import export
from vllm_lean_vocab.series import SERIES

from . import installed
from .conftest import Result

IDS = [pull_request.id for pull_request in SERIES]
BY_ID = {pull_request.id: pull_request for pull_request in SERIES}
PROPOSER = "vllm/v1/spec_decode/llm_base_proposer.py"


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Git as it is without anybody's settings, but with a name."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "vllm-lean-vocab tests")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "tests@example.invalid")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A git checkout of those of the installed vLLM's files that the series edits."""
    root = tmp_path / "checkout"
    installed.copy_sources(root)
    (root / "README.md").write_text("vLLM\n")
    git(root, "init", "--quiet", "--initial-branch=main")
    commit(root, "vLLM")
    return root


@pytest.fixture
def command(command: Callable[..., Result]) -> Callable[..., Result]:
    return partial(command, "export")


def git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=root, check=True, capture_output=True, text=True
    )
    return done.stdout


def commit(root: Path, message: str) -> None:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", message)


def state(root: Path) -> list[object]:
    """Return all that a user would see changed."""
    asked = (
        ("for-each-ref",),
        ("symbolic-ref", "HEAD"),
        ("status", "--porcelain", "--ignored"),
        ("stash", "list"),
    )
    index = (root / ".git" / "index").read_bytes()
    files = {
        path: path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and ".git" not in path.relative_to(root).parts
    }
    return [*(git(root, *each) for each in asked), index, files]


def files_of(root: Path, commit: str) -> dict[str, str]:
    names = git(root, "ls-tree", "-r", "--name-only", commit).splitlines()
    return {name: git(root, "show", f"{commit}:{name}") for name in names}


def test_branches(command: Callable[..., Result], checkout: Path) -> None:
    """One commit each, on what it builds on, that holds the change and nothing else."""
    hook = checkout / ".git" / "hooks" / "commit-msg"
    hook.write_text('#!/bin/sh\necho "Signed-off-by: x" >> "$1"; exit 1\n')
    hook.chmod(0o755)
    before = state(checkout)[1:]
    result = command("--onto", checkout)
    assert result.code == 0 and not result.err
    assert state(checkout)[1:] == before

    sources = installed.sources()
    for pull_request in SERIES:
        branch = f"lean-vocab/{pull_request.id}"
        assert branch in result.out
        bases = [each for each in pull_request.builds_on]
        parent = f"lean-vocab/{bases[-1]}" if bases else "main"
        parents = git(checkout, "rev-parse", f"{branch}^", parent).split()
        assert parents[0] == parents[1]
        was, now = files_of(checkout, parent), files_of(checkout, branch)
        wanted = plan.with_bases([pull_request.id], SERIES)
        stack = [each for each in SERIES if each.id in wanted]
        changed = plan.make_plan(sources, stack).files
        own = {path for path in now if now[path] != was.get(path)}
        # Files that are new to vLLM, and tests, are exactly those of this repository.
        ours = {*pull_request.tests, *pull_request.new_files}
        assert own == ours | {p for p in pull_request.edited_paths if p in changed}
        for path in own:
            if path in ours:
                assert now[path] == plan.repository_file(path).read_text()
            else:
                assert now[path] == diff.formatted(path, changed[path])
        message = git(checkout, "log", "-1", "--format=%B", branch)
        assert message.startswith(f"{pull_request.title}\n\n")
        assert not re.search("signed-off|co-authored", message, re.IGNORECASE)
        assert max(map(len, message.splitlines())) <= 79


def test_patch_files_make_the_branches(
    command: Callable[..., Result],
    checkout: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the user's settings would have patches look otherwise, or signed."""
    config = tmp_path / "gitconfig"
    config.write_text(
        "[format]\nsignOff = true\nattach = true\nthread = deep\ncoverLetter = true\n"
        "subjectPrefix = X\n[diff]\nnoprefix = true\n[color]\nui = always\n"
        "[commit]\ngpgSign = true\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    out = tmp_path / "a" / "prs"
    # From the installed vLLM, as no checkout is named.
    result = command("--out", out)
    assert result.code == 0 and not result.err
    assert sorted(path.name for path in out.iterdir()) == sorted(IDS)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    assert command("--onto", checkout).code == 0
    for pull_request in SERIES:
        patch, text = sorted((out / pull_request.id).iterdir())
        assert patch.name.startswith("0001-") and text.name == "PULL_REQUEST.md"
        assert "Signed-off-by" not in patch.read_text()
        bases = pull_request.builds_on
        git(checkout, "checkout", "--quiet", "--detach", "main")
        for id in (*bases, pull_request.id):
            [patch] = (out / id).glob("*.patch")
            git(checkout, "am", "--keep-non-patch", "--quiet", str(patch))
        branch = f"lean-vocab/{pull_request.id}"
        trees = git(checkout, "rev-parse", "HEAD^{tree}", f"{branch}^{{tree}}").split()
        assert trees[0] == trees[1]
        messages = [git(checkout, "log", "-1", "--format=%B", c) for c in ("@", branch)]
        assert messages[0] == messages[1]
        body = text.read_text()
        assert body.startswith(f"<!-- Title: {pull_request.title} -->\n## Purpose\n")
        assert "${" not in body


def test_both_at_once_for_scripts(
    command: Callable[..., Result], checkout: Path, tmp_path: Path
) -> None:
    options = ("--json", "--onto", checkout, "--out", tmp_path / "prs")
    [report] = json.loads(command("deferred_vocab", *options).out)
    assert report["branch"] == "lean-vocab/deferred_vocab"
    assert report["commit"] == git(checkout, "rev-parse", report["branch"]).strip()
    assert report["parent"] == git(checkout, "rev-parse", "main").strip()
    added = sum(each["added"] for each in report["lines"])
    kinds = ("edits", "new_files", "tests")
    assert sum(report[kind]["added"] for kind in kinds) == added
    assert report["edits"] == {"added": 9, "removed": 0}
    [patch] = (tmp_path / "prs" / "deferred_vocab").glob("*.patch")
    assert f"From {report['commit']}" in patch.read_text()


def test_what_it_builds_on_is_upstream(
    command: Callable[..., Result], checkout: Path
) -> None:
    assert command("--onto", checkout, "deferred_vocab").code == 0
    git(checkout, "merge", "--quiet", "lean-vocab/deferred_vocab")
    git(checkout, "branch", "--delete", "lean-vocab/deferred_vocab")
    result = command("--onto", checkout)
    assert result.code == 1
    assert "deferred_vocab: upstream, this vLLM has it already" in result.err
    others = [id for id in IDS if id != "deferred_vocab"]
    assert f"To export the others, name them: {' '.join(others)}" in result.err
    assert command("--onto", checkout, *others).code == 0
    parent = git(checkout, "rev-parse", "lean-vocab/qwen3_5_mtp^", "main").split()
    assert parent[0] == parent[1]


def test_again(command: Callable[..., Result], checkout: Path) -> None:
    """What didn't change stays where it is, also what another branch stands on."""
    assert command("--onto", checkout, "deferred_vocab", "qwen3_5_mtp").code == 0
    before = git(checkout, "for-each-ref")
    with pytest.MonkeyPatch.context() as patch:  # time passes
        for who in ("AUTHOR", "COMMITTER"):
            patch.setenv(f"GIT_{who}_DATE", "2040-01-01T00:00:00+0000")
        again = command("--onto", checkout, "--replace", "qwen3_5_mtp")
    assert again.code == 0 and " was " not in again.out
    assert git(checkout, "for-each-ref") == before

    old = git(checkout, "rev-parse", "lean-vocab/qwen3_5_mtp").strip()
    (checkout / "README.md").write_text("changed\n")
    commit(checkout, "another commit")
    moved = command("--onto", checkout, "--replace", "qwen3_5_mtp")
    assert f"lean-vocab/qwen3_5_mtp was {old[:12]}" in moved.out
    # Nothing is lost: the branch's log has it.
    assert git(checkout, "rev-parse", "lean-vocab/qwen3_5_mtp@{1}").strip() == old


def dirty(checkout: Path) -> None:
    (checkout / "README.md").write_text("changed\n")


def staged(checkout: Path) -> None:
    dirty(checkout)
    git(checkout, "add", "--all")


def in_the_way(checkout: Path) -> None:
    path = checkout / "vllm/model_executor/models/deferred_vocab.py"
    path.write_text("# something else\n")


def has_the_branch(checkout: Path) -> None:
    git(checkout, "branch", "lean-vocab/deferred_vocab")


def no_room_for_branches(checkout: Path) -> None:
    git(checkout, "branch", "lean-vocab")


def no_such_class(checkout: Path) -> None:
    path = checkout / PROPOSER
    path.write_text(path.read_text().replace("class SpecDecodeBase", "class Base"))
    commit(checkout, "renamed")


def not_formatted(checkout: Path) -> None:
    path = checkout / PROPOSER
    path.write_text(path.read_text() + "\nx  =  1\n")
    commit(checkout, "by hand")


def not_vllm(checkout: Path) -> None:
    (checkout / "vllm/__init__.py").unlink()
    commit(checkout, "another project")


@pytest.mark.parametrize(
    ("prepare", "code", "message"),
    [
        (dirty, 2, "changes that are not committed; commit or stash them first:\n   M"),
        (staged, 2, "changes that are not committed; commit or stash them first:\n  M"),
        (in_the_way, 2, "?? vllm/model_executor/models/deferred_vocab.py"),
        (has_the_branch, 2, "has lean-vocab/deferred_vocab already; rename or delete"),
        (no_room_for_branches, 2, "git update-ref failed"),
        (no_such_class, 1, "deferred_vocab: conflict, vllm/v1/spec_decode/llm_base_"),
        (not_formatted, 2, "llm_base_proposer.py is not formatted as ruff does"),
        (not_vllm, 2, "not a checkout of vLLM (no vllm/__init__.py)"),
    ],
)
def test_refused(
    command: Callable[..., Result],
    checkout: Path,
    tmp_path: Path,
    prepare: Callable[[Path], None],
    code: int,
    message: str,
) -> None:
    """The checkout is as it was, and no file was written."""
    prepare(checkout)
    before = state(checkout)
    result = command("--onto", checkout, "--out", tmp_path / "prs", "deferred_vocab")
    assert result.code == code and not result.out
    assert message in result.err and "Traceback" not in result.err
    assert state(checkout) == before
    assert not (tmp_path / "prs").exists()


def test_every_reason_is_told(command: Callable[..., Result], checkout: Path) -> None:
    no_such_class(checkout)
    result = command("--onto", checkout)
    assert result.code == 1
    told = [line for line in result.err.splitlines() if ": conflict, " in line]
    needs = [id for id in IDS if "deferred_vocab" in plan.with_bases([id], SERIES)]
    assert [line.split(":")[0] for line in told] == needs
    assert all("expected one definition" in line for line in told)


def test_a_branch_in_use_is_not_moved(
    command: Callable[..., Result], checkout: Path, tmp_path: Path
) -> None:
    assert command("--onto", checkout, "deferred_vocab").code == 0
    elsewhere = str(tmp_path / "elsewhere")
    git(checkout, "worktree", "add", "--quiet", elsewhere, "lean-vocab/deferred_vocab")
    before = state(checkout)
    result = command("--onto", checkout, "--replace", "deferred_vocab")
    assert result.code == 2
    assert f"is checked out in {elsewhere}; switch to another" in result.err
    assert state(checkout) == before


def test_nobody_is_made_up(
    command: Callable[..., Result],
    checkout: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.delenv(f"GIT_{who}_NAME")
        monkeypatch.delenv(f"GIT_{who}_EMAIL")
    config = tmp_path / "gitconfig"
    config.write_text("[user]\nuseConfigOnly = true\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    for where in (["--onto", checkout], ["--out", tmp_path / "prs"]):
        result = command(*where, "deferred_vocab")
        assert result.code == 2
        assert "git var failed" in result.err and "user.name" in result.err


def test_a_test_of_that_name(command: Callable[..., Result], checkout: Path) -> None:
    """A wheel holds no tests, so only a checkout shows that a name is taken."""
    [path] = BY_ID["deferred_vocab"].tests
    (checkout / path).parent.mkdir(parents=True)
    (checkout / path).write_text("# vLLM's own\n")
    commit(checkout, "a test")
    result = command("--onto", checkout, "deferred_vocab")
    assert result.code == 0
    assert f"{path}: this vLLM has a file of that name" in result.err


def test_files_that_are_there(
    command: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "prs"
    assert command("--out", out, "deferred_vocab").code == 0
    folder = out / "deferred_vocab"
    before = {path.name: path.read_text() for path in folder.iterdir()}
    refused = command("--out", out, "deferred_vocab")
    assert refused.code == 2 and f"{folder} is there already" in refused.err
    assert {path.name: path.read_text() for path in folder.iterdir()} == before

    assert command("--out", out, "--replace", "deferred_vocab").code == 0
    assert {path.name for path in folder.iterdir()} == set(before)
    assert [path.name for path in out.iterdir()] == ["deferred_vocab"]

    (folder / "notes.txt").write_text("mine")
    refused = command("--out", out, "--replace", "deferred_vocab")
    assert refused.code == 2 and "notes.txt is not from an export" in refused.err
    assert (folder / "notes.txt").read_text() == "mine"

    (tmp_path / "file").write_text("mine")
    refused = command("--out", tmp_path / "file" / "prs", "deferred_vocab")
    assert refused.code == 2 and "Not a directory" in refused.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "export needs --onto DIR, a checkout of vLLM, or --out DIR"),
        (["--onto", "/nowhere"], "/nowhere: no such folder"),
        (["--onto", "/"], "git rev-parse failed: fatal: not a git repository"),
        (["--onto", ".", "--vllm", "vllm"], "--vllm is for --out alone"),
        (["--out", "prs", "nonsense"], "no pull request 'nonsense'; known: deferred_"),
    ],
)
def test_wrong_usage(
    command: Callable[..., Result], arguments: list[str], message: str
) -> None:
    result = command(*arguments)
    assert result.code == 2 and not result.out
    assert message in result.err and "Traceback" not in result.err


def test_on_two_others(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its branch holds both, one after the other."""
    monkeypatch.setattr(description, "_SERIES", tmp_path)
    (tmp_path / "closing.md").write_text("")
    series = []
    for id in ("first", "second", "third"):
        (tmp_path / f"{id}.md").write_text(f"## Purpose\n\n{id}.\n")
        after = "self.model = self._get_model()"
        insert = Insert("SpecDecodeBaseProposer.load_model", f"{id} = 1", after=after)
        bases = ("first", "second") if id == "third" else ()
        series.append(
            PullRequest(id, f"[{id}]", [In(PROPOSER, insert)], builds_on=bases)
        )
    made = export(series, series, checkout=checkout)
    log = git(checkout, "log", "--format=%s", "lean-vocab/third").split()
    assert log == ["[third]", "[second]", "[first]", "vLLM"]
    assert [each.size("edits") for each in made] == [(1, 0)] * 3


@pytest.mark.parametrize("pull_request", SERIES, ids=IDS)
def test_text(pull_request: PullRequest) -> None:
    text = description.body(pull_request)
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings == [
        *("Purpose", "Test Plan", "Test Result", "Related"),
        *("AI assistance", "Before this is submitted"),
    ]
    assert f"    pytest {' '.join(pull_request.tests)}\n" in text
    for test in pull_request.tests:
        assert plan.repository_file(test).is_file()
    # Where figures come from: a release, a machine, a day.
    results = text.partition("## Test Result")[2].partition("## Related")[0]
    assert re.search(r"vLLM \d+\.\d+\.\d+", results)
    assert re.search(r"\d cores of ", results) and re.search(
        r"20\d\d-\d\d-\d\d", results
    )
    # Open threads on the same: each text says how it stands to some of them.
    assert re.search(r"#\d{5}", text.partition("## Related")[2])


def test_no_figure_is_typed_by_hand() -> None:
    """In a table every number is from a file."""
    for pull_request in SERIES:
        source = description._text(pull_request.id)
        for row in re.findall(r"^\|.*\|$", source, re.MULTILINE):
            by_hand = re.sub(r"\$\{[^}]*\}|(bfloat|int)\d+ rows", "", row)
            for cell in by_hand.strip("|").split("|")[1:]:
                assert not re.search(r"\d", cell), row


def test_a_figure_that_is_missing(
    command: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(description, "_SERIES", tmp_path)
    (tmp_path / "closing.md").write_text("")
    text = tmp_path / "deferred_vocab.md"
    text.write_text("## Purpose\n\nWhy.\n\n## Test Result\n\n${nothing.peak}\n")
    result = command("--out", tmp_path / "prs", "deferred_vocab")
    assert result.code == 2
    assert "benchmarks/results/nothing.json is missing" in result.err
    text.write_text(
        "## Purpose\n\nWhy.\n\n## Test Result\n\n${demo.nothing.mib:,.1f}\n"
    )
    result = command("--out", tmp_path / "prs", "deferred_vocab")
    assert result.code == 2
    assert "names demo.nothing.mib, which benchmarks/results/demo.json" in result.err
    assert not (tmp_path / "prs").exists()
