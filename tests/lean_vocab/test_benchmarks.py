# SPDX-License-Identifier: Apache-2.0
"""Benchmarks that no other test runs, on small models."""

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks import load_peak
from benchmarks.checkpoints import CountingModel, write_qwen3_5
from benchmarks.engine import EngineRun
from benchmarks.load_peak import Case, Measured
from benchmarks.loading import NoLoadingWindow, WorkerLoading, draft_loading
from benchmarks.logs import Marker
from benchmarks.memory import MIB, Sample
from benchmarks.plot import draw_peaks

ROOT = Path(__file__).parents[2]
CASE = Case("a model", partial(write_qwen3_5, vocab_size=32_768), reaches_limit=True)
# Two tables of 32 MiB; the draft owns 3 MiB.
MODEL = CountingModel(Path(), 32_768, 512, tied=False, draft_bytes=3 * MIB)
LEVELS = {"stock": (100, 170, 150), "patched": (100, 104, 150)}


def engine_run(
    folder: Path, name: str, levels: tuple[int, ...] | None = None, ranks: int = 1
) -> EngineRun:
    """Return what an engine would that keeps every promise."""
    log = folder / f"{name}.log"
    line = f"Qwen3_5MTP: {64 / ranks} MiB not allocated on this rank (...)\n"
    log.write_text(line * ranks if name == "patched" else "")
    before, peak, after = (mib * MIB for mib in levels or LEVELS[name])
    workers = [
        # Of several workers the figures are of the first, which logs when it starts.
        WorkerLoading(pid, pid == 0, 0.0, 1.0, before, peak + MIB * pid, after, [])
        for pid in range(ranks)
    ]
    return EngineRun(
        token_ids=MODEL.continuations(load_peak.PROMPTS, load_peak.MAX_TOKENS),
        texts=[],
        drafts=107,
        draft_tokens=107,
        accepted_tokens=82,
        vllm="0.32.0",
        log=log,
        workers=workers,
        no_loading=None,
    )


def measured(folder: Path, case: Case = CASE, **patched: Any) -> Measured:
    """Return two runs of each kind; ``patched`` changes those of the patched engine."""
    runs = {name: [engine_run(folder, name)] * 2 for name in LEVELS}
    runs["patched"] = [replace(run, **patched) for run in runs["patched"]]
    return Measured(case, {"stock": MODEL, "patched": MODEL}, runs, less_bytes=0)


def test_load_peak_report(tmp_path: Path) -> None:
    report = measured(tmp_path).to_json()
    assert report["failures"] == []
    assert report["identical"]
    assert report["stock"]["peak_above_before_mib"] == {
        "median": 70.0,
        "min": 70.0,
        "max": 70.0,
        "samples": [70.0, 70.0],
    }
    assert report["patched"]["not_allocated_mib"] == 64
    assert (report["table_mib"], report["tables"]) == (32, 2)
    assert (report["peak_lower_by_mib"], report["draft_owns_mib"]) == (66, 3)
    # Texts refer to figures by dotted names.
    assert all(name.isidentifier() for name in load_peak.CASES)
    plot = tmp_path / "plot.png"
    draw_peaks({"cases": {"a": report}, "vllm": "0.32.0"}, plot)
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("change", "levels", "failure"),
    [
        ({"token_ids": [[1]]}, None, "The patched tokens are not"),
        ({"drafts": 108}, None, "The number of drafts differs: stock [107, 107]"),
        ({"accepted_tokens": 81}, None, "The number of accepted draft tokens differs"),
        # What is no longer above the level before is below it.
        ({}, (120, 124, 150), "The loading peak fell by 46.0 MiB"),
        ({}, (100, 104, 153), "Memory after loading differs"),
        ({}, (100, 106, 150), "The patched peak is 6.0 MiB above the level before"),
        ({"log": Path("/dev/null")}, None, "A log says that 0.0 MiB were not"),
    ],
)
def test_load_peak_names_a_broken_promise(
    tmp_path: Path,
    change: dict[str, Any],
    levels: tuple[int, ...] | None,
    failure: str,
) -> None:
    if levels is not None:
        change = {"workers": engine_run(tmp_path, "patched", levels).workers}
    report = measured(tmp_path, **change).to_json()
    assert {text[: len(failure)] for text in report["failures"]} == {failure}
    assert report["identical"] == (
        not {"token_ids", "drafts", "accepted_tokens"} & {*change}
    )


def test_load_peak_of_ranks(tmp_path: Path) -> None:
    levels = {"stock": (100, 140, 150), "patched": (100, 102, 150)}
    runs = {
        name: [engine_run(tmp_path, name, levels[name], ranks=2)] for name in levels
    }
    case = replace(CASE, engine=load_peak.TWO_RANKS)
    models = {"stock": MODEL, "patched": MODEL}
    report = Measured(case, models, runs, less_bytes=0).to_json()
    assert report["failures"] == []
    assert (report["ranks"], report["table_mib"]) == (2, 16)
    assert report["stock"]["peak_above_before_mib"]["median"] == 40
    assert report["patched"]["not_allocated_mib"] == 64


def test_a_rank_that_is_ahead() -> None:
    """It ends before the first begins, which alone logs that: it can't be measured."""
    markers = [Marker(1.0, 8, opens=False), Marker(2.0, 7, opens=True)]
    markers.append(Marker(4.0, 7, opens=False))
    readings = [Sample(time, 100) for time in (0.5, 1.5, 3.0)]
    series, settled = {7: readings, 8: readings}, {7: 100, 8: 100}
    [worker] = draft_loading(markers, series, settled)
    assert (worker.pid, worker.logged_start) == (7, True)
    with pytest.raises(NoLoadingWindow):
        draft_loading(markers, {8: readings}, settled)


def test_load_peak_of_a_smaller_table(tmp_path: Path) -> None:
    """The patched engine keeps an embedding that is 16 MiB smaller."""
    case = replace(CASE, write_stock=CASE.write)
    log = tmp_path / "smaller.log"
    log.write_text("Qwen3_5MTP: 48.0 MiB not allocated on this rank (...)\n")
    workers = engine_run(tmp_path, "patched", (84, 88, 134)).workers
    result = measured(tmp_path, case, log=log, workers=workers)
    assert replace(result, less_bytes=16 * MIB).failures() == []
    result = measured(tmp_path, case, log=log)
    [failure] = replace(result, less_bytes=16 * MIB).failures()
    assert failure.startswith("Memory after loading fell by 0.0 MiB")


@pytest.mark.full
@pytest.mark.engine
def test_load_peak(
    tmp_path: Path,
    warm_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A small case keeps every promise; one that can't be served is reported."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(warm_cache))
    # Where logs of what failed are kept.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    unknown = replace(CASE, engine={"quantization": "unknown"})
    monkeypatch.setattr(load_peak, "CASES", {"small": CASE, "unknown": unknown})
    file, plot = tmp_path / "report.json", tmp_path / "plot.png"
    command = ["--repeats", "1", "--json", str(file), "--plot", str(plot), "--cases"]
    with pytest.raises(SystemExit) as ended:
        load_peak.main([*command, "small"])
    assert ended.value.code == 0
    assert "Every promise holds" in capsys.readouterr().out
    report = json.loads(file.read_text())
    small = report["cases"]["small"]
    assert small["failures"] == []
    assert small["patched"]["not_allocated_mib"] == small["table_mib"] * 2 == 64
    assert 0 < small["patched"]["accepted_tokens"] < small["patched"]["draft_tokens"]
    assert plot.exists()

    with pytest.raises(SystemExit) as ended:
        load_peak.main([*command, "unknown"])
    assert ended.value.code == 2
    assert "unknown: the engine ended with exit code 1" in capsys.readouterr().err


@pytest.mark.full
def test_head_construction(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    sizes = ["--vocab-size", "32768", "--hidden-size", "256"]
    command = [sys.executable, "-m", "benchmarks.head_construction", *sizes]
    done = subprocess.run(
        [*command, "--repeats", "1", "--json", file],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    stock, patched = report["stock"], report["patched"]
    # The head, and the norm before it.
    assert stock["head"] == "ParallelLMHead"
    assert stock["allocated_mib"]["median"] == (32_768 + 1) * 256 * 2 / 2**20
    assert patched["head"] == "DeferredLMHead"
    assert patched["allocated_mib"]["median"] == 256 * 2 / 2**20
    assert "stock    ParallelLMHead" in done.stdout
