# SPDX-License-Identifier: Apache-2.0
"""A vLLM is judged by the structure of its files, and by that alone."""

import ast
import inspect
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compat, served_release
from benchmarks.compat import examine
from benchmarks.engine import EngineFailed
from benchmarks.release_names import missing_names
from benchmarks.releases import NoRelease, last_error
from vllm_lean_vocab.plan import make_plan, read_sources, source_paths
from vllm_lean_vocab.series import SERIES

from . import installed

IDS = [pull_request.id for pull_request in SERIES]
PACKAGE = Path(inspect.getfile(make_plan)).parent
MODELS = "vllm/model_executor/models"
QWEN = f"{MODELS}/qwen3_5_mtp.py"
GLM = f"{MODELS}/glm4_moe_mtp.py"
PROPOSER = "vllm/v1/spec_decode/llm_base_proposer.py"
V2_LOADER = "vllm/v1/worker/gpu/spec_decode/eagle/utils.py"


@pytest.fixture
def fork(tmp_path: Path) -> Path:
    """A vLLM to change: those files of the installed one that decide."""
    installed.copy_sources(tmp_path)
    return tmp_path


def states(root: Path) -> dict[str, str]:
    report = examine(root)
    return {id: status["state"] for id, status in report["pull_requests"].items()}


def change(file: Path, *pairs: tuple[str, str]) -> None:
    text = file.read_text()
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)


# -------------------------------------------------------------------------- forks


def shifted(text: str) -> str:
    """Lines, a function and a class come before everything else but imports."""
    tree = ast.parse(text)
    imports = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    lines = text.splitlines(keepends=True)
    end = imports[-1].end_lineno
    more = "\n\ndef of_the_fork():\n    return 1\n\n\nclass OfTheFork:\n    pass\n\n"
    return "".join(["# A fork.\n" * 40, *lines[:end], more, *lines[end:]])


def reformatted(text: str) -> str:
    """Other quotes, line breaks and blank lines, and no comments."""
    return ast.unparse(ast.parse(text)) + "\n"


@pytest.mark.parametrize("rewrite", [shifted, reformatted])
def test_a_fork_whose_lines_are_different(
    fork: Path, rewrite: Callable[[str], str]
) -> None:
    before = read_sources(fork, SERIES)
    for path, text in before.items():
        if text is not None:
            (fork / path).write_text(rewrite(text))
    after = read_sources(fork, SERIES)
    assert all(after[path] != text for path, text in before.items() if text)
    assert set(states(fork).values()) == {"applies"}


def test_a_fork_whose_names_are_different(fork: Path) -> None:
    change(fork / V2_LOADER, ("_should_share", "shares_with_target"))
    change(fork / PROPOSER, ("logger", "log_of_fork"))
    change(fork / QWEN, ("intermediate_tensors", "from_stage_before"))
    change(fork / GLM, ("inputs_embeds", "embedded"))
    assert set(states(fork).values()) == {"applies"}


def test_the_version_is_not_asked_for(fork: Path) -> None:
    expected = examine(fork)
    for version in ("0.1.0", "99.0.dev7+gfork"):
        text = f"__version__ = version = {version!r}\n"
        (fork / "vllm" / "__init__.py").write_text(text)
        for name in ("_version", "version"):
            (fork / "vllm" / f"{name}.py").write_text(text)
        assert examine(fork) == expected

    assert list(inspect.signature(make_plan).parameters) == ["sources", "pull_requests"]
    assert not any("version" in path for path in source_paths(SERIES))


def test_versions_are_for_messages_alone() -> None:
    """No code of this package reads one, except to print it."""
    found = set()
    for file in PACKAGE.rglob("*.py"):
        tree = ast.parse(file.read_text())
        printed = {
            id(part)
            for text in ast.walk(tree)
            if isinstance(text, ast.JoinedStr)
            for part in ast.walk(text)
        }
        for node in ast.walk(tree):
            names = [getattr(node, part, None) for part in ("id", "attr", "module")]
            names += [
                a.name for a in getattr(node, "names", []) if type(a) is ast.alias
            ]
            if id(node) not in printed and any("version" in str(n) for n in names):
                found.add(file.name)
    # What `status`, `estimate` and `doctor` show.
    shown = {"build_draft.py", "cli.py", "doctor.py", "ray_nodes.py"}
    assert found == shown | {"report_process.py", "versions.py"}


@pytest.mark.parametrize(
    ("path", "old", "new", "off"),
    [
        (PROPOSER, "self.model = self._get_model()", "self.model = model", IDS),
        (V2_LOADER, "return eagle_model", "return draft", IDS),
        (QWEN, "self.lm_head = ParallelLMHead(", "self.head = Head(", ["qwen3_5_mtp"]),
        (GLM, "class SharedHead", "class Head", ["glm_mtp"]),
        (
            f"{MODELS}/qwen3_5.py",
            "class Qwen3_5Model(",
            "class Model(",
            ["qwen3_5_embed_quant"],
        ),
        (
            "vllm/model_executor/model_loader/base_loader.py",
            "def create_model(",
            "def make_model(",
            ["draft_vocab"],
        ),
    ],
)
def test_a_changed_anchor(
    fork: Path, path: str, old: str, new: str, off: list[str]
) -> None:
    change(fork / path, (old, new))
    report = examine(fork)["pull_requests"]
    if "deferred_vocab" in off:
        off = [p.id for p in SERIES if "deferred_vocab" in (p.id, *p.builds_on)]
    assert [id for id in IDS if report[id]["state"] == "conflict"] == off
    assert all(report[id]["state"] == "applies" for id in set(IDS) - set(off))
    assert path in report[off[0]]["reason"]
    assert "expected one" in report[off[0]]["reason"]
    for id in off[1:]:
        reason = report[id]["reason"]
        assert reason == "builds on deferred_vocab, which is not applied"


@pytest.mark.parametrize(
    ("path", "name", "ids"),
    [
        (
            "vllm/model_executor/layers/quantization/base_config.py",
            "method_has_implemented_embedding",
            ["qwen3_5_embed_quant"],
        ),
        (
            "vllm/model_executor/models/interfaces.py",
            "supports_multimodal",
            ["draft_vocab"],
        ),
        ("vllm/logger.py", "init_logger", IDS),
    ],
)
def test_what_new_files_import_is_there(
    fork: Path, path: str, name: str, ids: list[str]
) -> None:
    change(fork / path, (f"def {name}", f"def other_{name}"))
    report = examine(fork)["pull_requests"]
    assert [id for id in IDS if report[id]["state"] == "conflict"] == ids
    assert f"{path}: has no {name}, which" in report[ids[0]]["reason"]

    (fork / path).unlink()
    reason = examine(fork)["pull_requests"][ids[0]]["reason"]
    assert reason.startswith(f"{path}: not there, and vllm/model_executor/models/")


# --------------------------------------------------------------- names of a release


def release(root: Path, **files: str) -> Path:
    """Write modules of a vLLM; two underscores in a name stand for a slash."""
    for name, text in files.items():
        file = root / "vllm" / f"{name.replace('__', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_missing_names(tmp_path: Path) -> None:
    root = release(tmp_path, old="from vllm.gone import x\n", a="class A:\n    b = 1\n")
    package = root / "vllm" / "package"
    package.mkdir()
    (package / "__init__.py").write_text("from .inner import *\n")
    (package / "inner.py").write_text("from vllm.a import A as B\nif B:\n    c = 1\n")
    new = """
from typing import TYPE_CHECKING

from torch import anything
from vllm.a import A, b
from vllm.package import B, c, d, inner
from .package.inner import B, e
from .brought import f, g

if TYPE_CHECKING:
    from vllm.none import h

def late():
    from vllm.late import i
"""
    files = {
        "vllm/new.py": new,
        "vllm/brought.py": "f = len(g)\n",
        # What it imports on stock is no concern.
        "vllm/old.py": "from vllm.a import A\nfrom vllm.gone import x\n",
    }
    assert missing_names(root, files) == [
        f"vllm/new.py: imports {name} from vllm.{module}, which has no such name"
        for module, name in (
            ("a", "b"),
            ("brought", "g"),
            ("late", "i"),
            ("none", "h"),
            ("package", "d"),
            ("package.inner", "e"),
        )
    ]


def test_what_applies_is_sound(fork: Path) -> None:
    assert examine(installed.root())["unsound"] == []
    # Of this one all other files are missing.
    unsound = examine(fork)["unsound"]
    assert any("imports get_pp_group from vllm.distributed," in s for s in unsound)
    assert not any("deferred_vocab, " in sentence for sentence in unsound)


# -------------------------------------------------------------------- the command


@pytest.fixture
def releases(fork: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Releases that are all the same, but for one that can't be had."""

    def python_files(package: str, version: str) -> Path:
        if version == "0.1.0":
            raise NoRelease("pip can't download vllm==0.1.0")
        return fork

    monkeypatch.setattr(compat, "python_files", python_files)
    monkeypatch.setattr(compat, "missing_names", lambda root, files: [])
    return fork


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[Any, str, str]:
    with pytest.raises(SystemExit) as ended:
        compat.main(arguments)
    captured = capsys.readouterr()
    return ended.value.code, captured.out, captured.err


def test_table_and_report(
    releases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "compat.json"
    code, out, err = run(capsys, "--releases", "0.31.0", "0.28.0", "--json", str(file))
    assert (code, err.strip()) == (0, "")
    assert "0.28.0*" in out and out.count("applies") == 2 * len(IDS)
    assert "vLLM 0.31.0: glm_mtp: vLLM leaves out GLM-5.3's head" in out
    report = json.loads(file.read_text())
    assert list(report["releases"]) == ["0.31.0", "0.28.0"]
    for version, supported in (("0.31.0", True), ("0.28.0", False)):
        found = report["releases"][version]
        assert found["supported"] is supported and found["unsound"] == []
        assert list(found["pull_requests"]) == IDS


@pytest.mark.parametrize(("version", "expected"), [("0.31.0", 1), ("0.28.0", 0)])
def test_a_conflict(
    releases: Path, version: str, expected: int, capsys: pytest.CaptureFixture[str]
) -> None:
    change(releases / QWEN, ("self.lm_head = ParallelLMHead(", "self.head = Head("))
    code, out, _ = run(capsys, "--releases", version)
    assert code == expected
    assert f"{version}: qwen3_5_mtp: {QWEN}: Qwen3_5MTP.__init__: expected one" in out
    is_named = "FAILED vLLM 0.31.0 is supported, but qwen3_5_mtp is a conflict." in out
    assert is_named == bool(expected)


def test_what_applies_unsoundly(
    releases: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(compat, "missing_names", lambda root, files: ["no x in y"])
    code, out, _ = run(capsys, "--releases", "0.28.0")
    assert code == 1 and "FAILED vLLM 0.28.0: no x in y" in out


def test_a_release_that_cannot_be_had(
    releases: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "--releases", "0.1.0", "0.33.0")
    assert code == 2 and out.count("applies") == len(IDS)
    assert "vLLM 0.1.0: pip can't download vllm==0.1.0" in err
    pip = "WARNING: a\nERROR: None fits (from versions: 1, 2)\nERROR: No match\n"
    assert (last_error(pip), last_error("died\n")) == ("No match", "died")


def test_an_engine_that_fails(
    releases: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def serve(version: str, *_: Any) -> dict[str, Any]:
        if version == "0.30.0":
            raise EngineFailed("the engine ended with exit code 1")
        return {"prompts": 0, "cases": {}}

    # Where logs of what failed are kept.
    monkeypatch.setattr(tempfile, "tempdir", str(releases))
    monkeypatch.setattr(compat, "interpreter", lambda *_: Path("python"))
    monkeypatch.setattr(served_release, "serve", serve)
    serve_both = ["--serve", "0.30.0", "0.31.0"]
    code, out, err = run(capsys, "--releases", "0.33.0", *serve_both)
    assert code == 2 and "vLLM 0.31.0 on a CPU" in out
    assert "vLLM 0.30.0: the engine ended with exit code 1" in err


def test_all_supported_releases_are_examined() -> None:
    assert set(compat.SUPPORTED) < set(compat.RELEASES)
    assert set(served_release.LOADED_ONLY) < set(served_release.SERVABLE)
