# SPDX-License-Identifier: Apache-2.0
"""Benchmarks that no other test runs, on small models."""

import importlib.util
import json
import mmap
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import draft_load_time, load_peak, readme, serve_parity, start_cost
from benchmarks.checkpoints import CountingModel, write_qwen3_5
from benchmarks.draft_load_time import Load
from benchmarks.engine import EngineRun
from benchmarks.extension.page_cache import drop, fill, resident
from benchmarks.load_peak import Case, Measured
from benchmarks.loading import NoLoadingWindow, WorkerLoading, draft_loading
from benchmarks.logs import Marker
from benchmarks.memory import MIB, Sample
from benchmarks.plot import (
    draw_load_times,
    draw_parity,
    draw_peaks,
    draw_start_cost,
)
from benchmarks.plugins import change_config
from benchmarks.process import EXTENSION
from benchmarks.report import spread
from benchmarks.serve_parity import Parity, Served
from benchmarks.server import Completion, SpeculativeCounters

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
    tables = 32 * case.tables / case.engine.get("tensor_parallel_size", 1)
    return Measured(case, {"stock": MODEL, "patched": MODEL}, runs, 0, tables)


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
    assert report["runner"] == "legacy"
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


@pytest.mark.parametrize("name", load_peak.CASES)
def test_load_peak_wants_every_table_unallocated(tmp_path: Path, name: str) -> None:
    case = load_peak.CASES[name]
    ranks = case.engine.get("tensor_parallel_size", 1)
    complaints = []
    for tables in (case.tables, case.tables - 1):
        log = tmp_path / f"{tables}.log"
        line = f"Draft: {32 * tables / ranks} MiB not allocated on this rank (...)\n"
        log.write_text(line * ranks if tables else "")
        failures = measured(tmp_path, case, log=log).failures()
        complaints.append(any(text.startswith("A log says") for text in failures))
    assert complaints == [False, True]


def test_load_peak_wants_the_estimate_to_be_right(tmp_path: Path) -> None:
    wrong = replace(measured(tmp_path), estimated_mib=32)
    [failure] = wrong.failures()
    assert failure.startswith("The estimate says that 32.0 MiB")


def test_load_peak_of_a_gpu(tmp_path: Path) -> None:
    """Its figures take the place of the host's, which V2's log can't give."""
    levels = {"stock": (10, 77, 60), "patched": (10, 13, 60)}
    runs = {
        name: [
            replace(
                engine_run(tmp_path, name),
                workers=[],
                no_loading="the log has no such line",
                runner="v2",
                device=[
                    {
                        "before_mib": before,
                        "peak_mib": peak,
                        "peak_above_before_mib": peak - before,
                        "after_mib": after,
                        "reserved_peak_mib": 100,
                        "window_s": 1.0,
                    }
                ],
            )
        ]
        for name, (before, peak, after) in levels.items()
    }
    models = {"stock": MODEL, "patched": MODEL}
    report = Measured(CASE, models, runs, 0, estimated_mib=64).to_json()
    assert report["failures"] == []
    assert report["runner"] == "v2"
    assert report["peak_lower_by_mib"] == 64
    assert report["stock"]["reserved_peak_mib"]["median"] == 100


class Gpu:
    """Stands for ``torch.cuda``: levels in MiB that a test sets."""

    allocated = reserved = most_allocated = most_reserved = 0
    total = 1000
    others = 100

    def allocate(self, mib: int) -> None:
        self.allocated += mib
        self.reserved = max(self.reserved, self.allocated)
        self.most_allocated = max(self.most_allocated, self.allocated)
        self.most_reserved = max(self.most_reserved, self.reserved)

    def memory_allocated(self) -> int:
        return self.allocated * MIB

    def memory_reserved(self) -> int:
        return self.reserved * MIB

    def max_memory_allocated(self) -> int:
        return self.most_allocated * MIB

    def max_memory_reserved(self) -> int:
        return self.most_reserved * MIB

    def reset_peak_memory_stats(self) -> None:
        self.most_allocated, self.most_reserved = self.allocated, self.reserved

    def mem_get_info(self) -> tuple[int, int]:
        used = self.others + self.reserved
        return (self.total - used) * MIB, self.total * MIB


def worker_module(name: str) -> ModuleType:
    """Import a module of the workers, as they do: not from this package."""
    spec = importlib.util.spec_from_file_location(name, EXTENSION / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_memory_of_a_gpu_while_a_draft_loads() -> None:
    gpu, cuda_memory = Gpu(), worker_module("cuda_memory")

    class Proposer:
        def load_model(self, target: str) -> str:
            gpu.allocate(64)
            gpu.allocate(-61)
            return target

    class OfItsOwn(Proposer):
        def load_model(self, target: str) -> str:
            return super().load_model(target)

    gpu.allocate(50)
    gpu.allocate(-40)
    cuda_memory.watch(Proposer, gpu)
    assert OfItsOwn().load_model("target") == "target"
    gpu.allocate(20)
    [window] = cuda_memory.WINDOWS
    figures = window.figures()
    assert figures.pop("window_s") >= 0
    assert figures == {
        "before_mib": 10,
        "peak_mib": 74,
        "peak_above_before_mib": 64,
        "after_mib": 33,
        "reserved_before_mib": 50,
        "reserved_peak_mib": 74,
        "reserved_peak_above_before_mib": 24,
        "used_before_mib": 150,
        "used_peak_mib": 174,
        "used_peak_above_before_mib": 24,
    }


START_COSTS = {"warm": [4.0, 9.0], "cold": [900.0], "cold_together": [1000.0] * 8}
READY = {"stock": [20.0, 22.0], "patched": [20.5, 21.5]}


def start_cost_report(**more: Any) -> dict[str, Any]:
    """Return a report without what it was made with."""
    figures = {f"{name}_ms": spread(each) for name, each in START_COSTS.items()}
    return {"vllm": "0.32.0", "promised_ms": start_cost.MOST_MS, **figures, **more}


def test_start_cost_names_a_broken_promise() -> None:
    assert start_cost.failures(START_COSTS) == []
    slow = {"warm": [14.0, 15.9, 15.8], "cold": [2500.0], "cold_together": [1.0]}
    warm, cold = start_cost.failures(slow)
    assert warm.startswith("warm: the median is 15.8 ms; at most 15 ms")
    assert cold.startswith("cold: the median is 2,500.0 ms; at most 2,000 ms")


@pytest.mark.parametrize("with_server", [True, False])
def test_start_cost_report(tmp_path: Path, with_server: bool) -> None:
    ready = start_cost.serve_ready(READY)
    assert (ready["difference_s"], ready["spread_of_stock_s"]) == (0, 2)
    report = start_cost_report(**({"serve_ready": ready} if with_server else {}))
    lines = "\n".join(start_cost.lines(report))
    assert "cold              900.0 ms (900.0 to 900.0), at most 2,000 ms" in lines
    assert ("stock alone varies by 2.00 s" in lines) == with_server
    text = readme.about_start_cost(report)
    assert "adds 6.5 ms (4.0 to 9.0)" in text.replace("\n", " ")
    assert ("`vllm serve` is ready" in text.replace("\n", " ")) == with_server
    plot = tmp_path / "plot.png"
    draw_start_cost(report, plot)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_load_peak_of_ranks(tmp_path: Path) -> None:
    levels = {"stock": (100, 140, 150), "patched": (100, 102, 150)}
    runs = {
        name: [engine_run(tmp_path, name, levels[name], ranks=2)] for name in levels
    }
    case = replace(CASE, engine=load_peak.TWO_RANKS)
    models = {"stock": MODEL, "patched": MODEL}
    report = Measured(case, models, runs, 0, estimated_mib=32).to_json()
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
    file, plot = tmp_path / "report.json", tmp_path / "plot.png"
    sizes = ["--vocab-size", "32768", "--hidden-size", "256"]
    command = [sys.executable, "-m", "benchmarks.head_construction", *sizes]
    done = subprocess.run(
        [*command, "--repeats", "1", "--json", file, "--plot", plot],
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
    assert stock["allocated_mib"]["min"] == (32_768 + 1) * 256 * 2 / 2**20
    assert patched["head"] == "DeferredLMHead"
    assert patched["allocated_mib"]["min"] == 256 * 2 / 2**20
    assert "stock    ParallelLMHead" in done.stdout
    assert {"date", "vllm", "versions", "machine"} <= report.keys()
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_start_cost(tmp_path: Path) -> None:
    file, plot = tmp_path / "report.json", tmp_path / "plot.png"
    command = [sys.executable, "-m", "benchmarks.start_cost", "--repeats", "1"]
    done = subprocess.run(
        [*command, "--no-serve", "--json", file, "--plot", plot],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    report = json.loads(file.read_text())
    # A busy machine breaks promises: they are named.
    assert done.returncode == (1 if report["failures"] else 0), done.stderr
    assert all(failure in done.stdout for failure in report["failures"])
    assert report["promised_ms"] == start_cost.MOST_MS
    assert len(report["cold_together_ms"]["samples"]) == start_cost.TOGETHER
    assert "serve_ready" not in report
    assert plot.exists()


# Of the small model, with its tables in shards of their own.
SHARDS = {"head": 32 * MIB, "embedding": 32 * MIB, "rest": 8 * MIB}
LOADED = {
    "stock": Load(2.5, 0.5, 72 * MIB, dict.fromkeys(SHARDS, 0), SHARDS),
    "patched": Load(
        0.75, 0.5, 24 * MIB, dict.fromkeys(SHARDS, 0), dict.fromkeys(SHARDS, 8 * MIB)
    ),
}


def loads_of(folder: Path, **patched: Any) -> draft_load_time.Measured:
    """Return two loads of each kind; ``patched`` changes the cold patched ones."""
    right = MODEL.continuations(draft_load_time.PROMPTS, draft_load_time.MAX_TOKENS)
    runs = {
        name: [replace(engine_run(folder, name), token_ids=right)] * 4
        for name in LOADED
    }
    cold = {name: [load] * 2 for name, load in LOADED.items()}
    warm = {
        name: [replace(load, read_bytes=0, cached_before=SHARDS)] * 2
        for name, load in LOADED.items()
    }
    cold["patched"] = [replace(load, **patched) for load in cold["patched"]]
    return draft_load_time.Measured(
        draft_load_time.Case("a model", CASE.write),
        MODEL,
        SHARDS,
        ["head", "embedding"],
        runs,
        {"cold": cold, "warm": warm},
    )


def test_draft_load_time_report(tmp_path: Path) -> None:
    report = loads_of(tmp_path).to_json()
    assert report["failures"] == []
    assert report["identical"]
    assert report["cold"]["stock"]["loading_s"]["samples"] == [2.0, 2.0]
    assert report["cold"]["patched"]["with_collections_s"]["median"] == 0.75
    assert report["cold"]["patched"]["read_mib"]["median"] == 24
    assert report["warm"]["part_of_seconds"] == 0.125
    assert report["warm"]["part_with_collections"] == 0.3
    assert report["cold"]["part_of_bytes"] == 0.333
    assert report["files_mib"] == {"head": 32, "embedding": 32, "rest": 8}
    assert all(name.isidentifier() for name in draft_load_time.CASES)
    assert draft_load_time.table({"a": report}).row_count == 2
    plot = tmp_path / "plot.png"
    shown = {"cases": {"a": report}, "caches": ["cold", "warm"], "vllm": "0.32.0"}
    draw_load_times(shown, plot)
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("change", "failure"),
    [
        ({"seconds": 1.75}, "Cold, the draft took 0.62 of stock's seconds"),
        ({"read_bytes": 54 * MIB}, "The draft read 0.75 of what it reads from disk"),
        (
            {"cached_before": {**SHARDS, "rest": 0}},
            "A patched load was not cold: of 72.0 MiB the page cache held 64.0 MiB.",
        ),
        (
            {"cached_after": {**SHARDS, "head": 0}},
            "32.0 MiB of embedding were read, which holds nothing",
        ),
    ],
)
def test_draft_load_time_names_a_broken_promise(
    tmp_path: Path, change: dict[str, Any], failure: str
) -> None:
    report = loads_of(tmp_path, **change).to_json()
    assert {text[: len(failure)] for text in report["failures"]} == {failure}


def test_page_cache(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(3 * MIB + 1))
    pages = 3 * MIB + mmap.PAGESIZE
    drop(file)
    # A file system in memory keeps what it has.
    assert resident(file) in (0, pages)
    fill(file)
    assert resident(file) == pages


def test_shards_that_hold_nothing_wanted(tmp_path: Path) -> None:
    write_qwen3_5(tmp_path, vocab_size=512, hidden_size=128, shards="tables")
    files = sorted(tmp_path.glob("*.safetensors"))
    assert draft_load_time.unwanted(files) == [file.name for file in files[:2]]


@pytest.mark.full
@pytest.mark.engine
def test_draft_load_time(
    tmp_path: Path,
    warm_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A real draft is read as promised, and the worker measures it."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(warm_cache))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # How long it takes is not for a test to say.
    monkeypatch.setattr(draft_load_time, "MOST_OF_SECONDS", float("inf"))
    write = partial(write_qwen3_5, vocab_size=32_768, shards="tables")
    small = draft_load_time.Case("a model", write)
    monkeypatch.setattr(draft_load_time, "CASES", {"small": small})
    probe = tmp_path / "probe"
    probe.write_bytes(bytes(MIB))
    drop(probe)
    if resident(probe):
        pytest.skip("temporary files stay in the page cache here")
    file, plot = tmp_path / "report.json", tmp_path / "plot.png"
    with pytest.raises(SystemExit) as ended:
        draft_load_time.main(
            ["--repeats", "1", "--json", str(file), "--plot", str(plot)]
        )
    captured = capsys.readouterr()
    assert ended.value.code == 0, captured.out + captured.err
    report = json.loads(file.read_text())["cases"]["small"]
    assert len(report["files_without_wanted"]) == 2
    stock = report["cold"]["stock"]["cached_after_mib"][0]
    assert stock == pytest.approx(report["files_mib"], abs=0.1)
    assert report["cold"]["stock"]["read_mib"]["median"] > 64
    assert report["warm"]["patched"]["loading_s"]["median"] > 0
    assert plot.exists()


def served(
    tokens_per_second: float,
    text: str | None = None,
    usage: dict[str, int] | None = None,
    drafts: int = 107,
    not_allocated_mib: float = 64,
) -> Served:
    """Return a server that keeps every promise, unless told otherwise."""
    alone, together = (
        [
            Completion(" ".join(map(str, ids)), usage or {"completion_tokens": 3})
            for ids in MODEL.continuations(number, 3)
        ]
        for number in (2, 4)
    )
    if text is not None:
        together[-1] = replace(together[-1], text=text)
    counters = SpeculativeCounters(drafts, drafts, 82)
    seconds = 12 / tokens_per_second
    return Served(alone, counters, together, seconds, not_allocated_mib)


def parity(stock: list[Served], patched: list[Served]) -> Parity:
    """Return what was asked of such servers and what they did."""
    return Parity(
        serve_parity.Load(prompts=2, requests=4, clients=2, max_tokens=3),
        {"stock": stock, "patched": patched},
        MODEL,
    )


def test_serve_parity_report(tmp_path: Path) -> None:
    stock, patched = [served(100), served(104)], [served(101), served(102)]
    report = {"vllm": "0.32.0", **parity(stock, patched).to_json()}
    assert report["failures"] == []
    assert report["identical"]
    assert report["stock"]["tokens_per_second"]["samples"] == [100, 104]
    assert report["patched"]["tokens_per_second"]["median"] == 101.5
    assert report["ratio"]["samples"] == [1.01, 0.9808]
    assert report["throughput_is_the_same"] is True
    assert serve_parity.table(report).row_count == 4
    assert "within its spread" in serve_parity.verdict(report)
    plot = tmp_path / "plot.png"
    draw_parity(report, plot)
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("stock", "patched", "same"),
    [
        ([100, 104], [99, 103], True),  # all below, and stock varies as much
        ([100, 101], [97, 98], False),
        ([100, 101], [103, 104], False),
        ([100], [50], None),
    ],
)
def test_serve_parity_of_throughput(
    stock: list[float], patched: list[float], same: bool | None
) -> None:
    runs = [served(each) for each in stock], [served(each) for each in patched]
    result = parity(*runs)
    assert result.throughput_is_the_same is same
    failures = [text.split(":")[0] for text in result.failures()]
    assert failures == ["Throughput differs"] * (same is False)


@pytest.mark.parametrize(
    ("change", "failures"),
    [
        (
            {"text": "1 2 3"},
            [
                "1 answers of the patched servers to prompts sent together are not",
                "The text of prompts sent together differs",
            ],
        ),
        (
            {"usage": {"completion_tokens": 3, "prompt_tokens": 4}},
            [
                "The usage of prompts sent one at a time differs",
                "The usage of prompts sent together differs",
            ],
        ),
        (
            {"drafts": 108},
            [
                "The number of drafts differs: stock [107], patched [108]",
                "The number of draft tokens differs",
            ],
        ),
    ],
)
def test_serve_parity_names_a_different_answer(
    change: dict[str, Any], failures: list[str]
) -> None:
    report = parity([served(100)], [served(100, **change)]).to_json()
    assert not report["identical"]
    for text, failure in zip(report["failures"], failures, strict=True):
        assert text.startswith(failure)


def test_serve_parity_of_a_server_that_is_not_patched() -> None:
    result = parity([served(100)], [served(100, not_allocated_mib=0)])
    [failure] = result.failures()
    assert failure.startswith("A log says that 0.0 MiB were not allocated")


@pytest.mark.full
@pytest.mark.engine
def test_serve_parity(
    tmp_path: Path,
    warm_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two small servers agree; one that does not start is reported."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(warm_cache))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file, plot = tmp_path / "report.json", tmp_path / "plot.png"
    sizes = ["--prompts", "2", "--requests", "8", "--clients", "4"]
    command = [*sizes, "--vocab-size", "32768", "--max-tokens", "24", "--repeats", "1"]
    with pytest.raises(SystemExit) as ended:
        serve_parity.main([*command, "--json", str(file), "--plot", str(plot)])
    captured = capsys.readouterr()
    assert ended.value.code == 0, captured.out + captured.err
    assert "One pair says nothing of throughput" in captured.out
    report = json.loads(file.read_text())
    assert report["identical"]
    assert 0 < report["stock"]["accepted_tokens"] < report["stock"]["draft_tokens"]
    assert plot.exists()

    def write_broken(path: Path, **sizes: Any) -> CountingModel:
        model = write_qwen3_5(path, **sizes)
        change_config(path, architectures=["Unknown"])
        return model

    monkeypatch.setattr(serve_parity, "write_qwen3_5", write_broken)
    with pytest.raises(SystemExit) as ended:
        serve_parity.main(command)
    assert ended.value.code == 2
    assert "stock: vllm serve ended with exit code 1" in capsys.readouterr().err
