# SPDX-License-Identifier: Apache-2.0
"""Measures how long a draft takes to load and what it reads from disk.

``python -m benchmarks.draft_load_time [--cases NAME ...] [--json FILE] [--plot FILE]``.
Real engines load a tiny checkpoint with vLLM's own loader, stock and patched in turn.
The proposer's method that loads the draft is measured in the worker, with an extension
of it (``extension/draft_load.py``).

The target has just been loaded from the same files. So right before the draft loads
they are all read into the page cache (``warm``), or the kernel is asked to drop them
(``cold``). What it holds then is asked for, too (``mincore``): a run that was not warm
or cold is a failure here, not a figure. It is one where the checkpoint lies in memory,
as on a tmpfs: name a ``--directory`` on a disk.

Seconds are given without Python's garbage collections. vLLM asks for two when it loads
a model. They take as long as the process has objects, stock or patched, whatever is
loaded: for a draft this small that is most of the time. The report has both.

Bytes read are those that the kernel read from disk for the worker meanwhile. Files are
mapped, so this counts the pages that were touched and what the kernel read ahead of
them: a shard that is opened for its header alone counts with some MiB. What the page
cache holds of each shard after a cold load says which were read. A warm load reads
nothing from disk, whatever it touches.

Exit code 0: every promise holds. 1: one does not, and is named. 2: an engine failed.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.table import Table
from safetensors import safe_open

from benchmarks.cases import Tick, parse, run_cases
from benchmarks.checkpoints import CountingModel, write_qwen3_5
from benchmarks.comparison import COUNTERS, log_failures, output_failures
from benchmarks.engine import EngineFailed, EngineRun, run_engine
from benchmarks.logs import not_allocated_mib
from benchmarks.memory import MIB
from benchmarks.plot import draw_load_times
from benchmarks.process import SWITCHES, exit_with
from benchmarks.report import made_with, spread

EXTENSION_CLASS = "draft_load.DraftLoad"
CACHES = ("cold", "warm")
PROMPTS = 2
MAX_TOKENS = 24
TIMEOUT = 600.0
# Vocabulary tables of a draft.
TABLES = 2
# What loading may take, as a part of what it takes on stock.
MOST_OF_SECONDS = 0.5
MOST_OF_BYTES = 0.5
# What may be read of a shard that is opened for its header alone, in MiB.
MOST_READ_AHEAD = 16.0
# Part of the checkpoint that may be in the page cache, or not, although it should not,
# or should.
MOST_OTHERWISE = 0.01


@dataclass(frozen=True)
class Case:
    """A checkpoint.

    Attributes:
        description: What it is, for people.
        write: Writes it into a directory.
    """

    description: str
    write: Callable[[Path], CountingModel]


# Names are identifiers: texts refer to figures by them.
CASES: dict[str, Case] = {
    "qwen3_5": Case("Qwen3.5, one file", write_qwen3_5),
    "qwen3_5_sharded": Case(
        "Qwen3.5, tables in shards of their own",
        partial(write_qwen3_5, shards="tables"),
    ),
}


@dataclass(frozen=True)
class Load:
    """How one draft was loaded, as the worker measured it.

    Attributes:
        seconds: How long it took.
        collecting_seconds: How many of them Python's garbage collector took.
        read_bytes: What was read from disk meanwhile.
        cached_before: Bytes of each file in the page cache, by name, just before.
        cached_after: The same just after.
    """

    seconds: float
    collecting_seconds: float
    read_bytes: int
    cached_before: Mapping[str, int]
    cached_after: Mapping[str, int]

    @property
    def loading_seconds(self) -> float:
        """How long it took without Python's garbage collections."""
        return self.seconds - self.collecting_seconds


@dataclass(frozen=True)
class Measured:
    """What the engines of one case did.

    Attributes:
        case: The case.
        model: Its checkpoint, which needs not be there any more.
        sizes: Bytes of each file of the checkpoint, by name.
        unwanted: Names of those that hold nothing that the patched draft loads.
        runs: The engines' results, stock and patched, whatever the page cache.
        loads: How the drafts were loaded, by page cache, stock and patched.
    """

    case: Case
    model: CountingModel
    sizes: Mapping[str, int]
    unwanted: Sequence[str]
    runs: Mapping[str, Sequence[EngineRun]]
    loads: Mapping[str, Mapping[str, Sequence[Load]]]

    def part(self, cache: str, what: str) -> float:
        """Return patched as a part of stock.

        Args:
            cache: ``cold`` or ``warm``.
            what: An attribute of ``Load``, of which the medians are taken.
        """
        stock, patched = (
            median([getattr(load, what) for load in self.loads[cache][name]])
            for name in SWITCHES
        )
        return patched / stock if stock else float("inf")

    def output_failures(self) -> list[str]:
        """Return every promise about tokens and counters that does not hold."""
        right = self.model.continuations(PROMPTS, MAX_TOKENS)
        return output_failures(self.runs, dict.fromkeys(self.runs, right))

    def failures(self) -> list[str]:
        """Return every promise that does not hold, as a sentence each."""
        failures = self.output_failures()
        failures += log_failures(
            [sum(not_allocated_mib(run.log)) for run in self.runs["patched"]],
            TABLES * self.model.table_bytes / MIB,
        )
        size = sum(self.sizes.values())
        for cache, kinds in self.loads.items():
            wanted = 0 if cache == "cold" else size
            for name, loads in kinds.items():
                for load in loads:
                    cached = sum(load.cached_before.values())
                    # Pages are counted as a whole.
                    if abs(cached - wanted) > MOST_OTHERWISE * size:
                        failures.append(
                            f"A {name} load was not {cache}: of {size / MIB:,.1f} MiB "
                            f"the page cache held {cached / MIB:,.1f} MiB."
                        )
            part = self.part(cache, "loading_seconds")
            if part > MOST_OF_SECONDS:
                failures.append(
                    f"{cache.capitalize()}, the draft took {part:.2f} of stock's "
                    f"seconds to load; {MOST_OF_SECONDS:g} at most was promised."
                )
        part = self.part("cold", "read_bytes")
        if part > MOST_OF_BYTES:
            failures.append(
                f"The draft read {part:.2f} of what it reads from disk on stock; "
                f"{MOST_OF_BYTES:g} at most was promised."
            )
        for file in self.unwanted:
            read = max(
                load.cached_after[file] for load in self.loads["cold"]["patched"]
            )
            if read / MIB > MOST_READ_AHEAD:
                failures.append(
                    f"{read / MIB:,.1f} MiB of {file} were read, which holds nothing "
                    "that the draft loads."
                )
        return failures

    def to_json(self) -> dict[str, Any]:
        """Return figures and verdict, ready for ``json.dump``."""
        figures: dict[str, Any] = {}
        for cache, kinds in self.loads.items():
            figures[cache] = {
                **{name: _figures(loads) for name, loads in kinds.items()},
                "part_of_seconds": round(self.part(cache, "loading_seconds"), 3),
                "part_with_collections": round(self.part(cache, "seconds"), 3),
            }
        figures["cold"]["part_of_bytes"] = round(self.part("cold", "read_bytes"), 3)
        return {
            "description": self.case.description,
            "tables": TABLES,
            "table_mib": round(self.model.table_bytes / MIB, 2),
            "draft_owns_mib": round(self.model.draft_bytes / MIB, 2),
            "files_mib": _in_mib(self.sizes),
            "files_without_wanted": list(self.unwanted),
            **figures,
            **{name: getattr(self.runs["stock"][0], name) for name in COUNTERS},
            "identical": not self.output_failures(),
            "failures": self.failures(),
        }


def _figures(loads: Sequence[Load]) -> dict[str, Any]:
    """Return what loads of one kind came to; bytes in MiB."""
    return {
        "loading_s": spread([round(load.loading_seconds, 4) for load in loads]),
        "with_collections_s": spread([round(load.seconds, 4) for load in loads]),
        "read_mib": spread([round(load.read_bytes / MIB, 2) for load in loads]),
        "cached_before_mib": [_in_mib(load.cached_before) for load in loads],
        "cached_after_mib": [_in_mib(load.cached_after) for load in loads],
    }


def _in_mib(sizes: Mapping[str, int]) -> dict[str, float]:
    return {name: round(size / MIB, 2) for name, size in sizes.items()}


def unwanted(files: Sequence[Path]) -> list[str]:
    """Return the names of those safetensors files without a tensor of the MTP layers.

    Raises:
        OSError: If one can't be read.
    """
    names = []
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            if not any(name.startswith("mtp.") for name in tensors.keys()):  # noqa: SIM118
                names.append(file.name)
    return names


def load_draft(
    model: CountingModel, kind: str, cache: str, log: Path
) -> tuple[EngineRun, Load]:
    """Run one engine; return what it generated and how its draft was loaded.

    Args:
        model: The checkpoint.
        kind: ``stock`` or ``patched``.
        cache: ``cold`` or ``warm``.
        log: File that the engine's output goes to.

    Raises:
        EngineFailed: If the engine does not start or answer, or if its worker did not
            measure anything.
        OSError: If something can't be written.
    """
    with tempfile.TemporaryDirectory(prefix="draft-load-time-") as directory:
        result = Path(directory, "result")
        run = run_engine(
            model.path,
            prompts=model.prompts(PROMPTS),
            max_tokens=MAX_TOKENS,
            log=log,
            timeout=TIMEOUT,
            env={
                **SWITCHES[kind],
                "DRAFT_LOAD_CHECKPOINT": str(model.path),
                "DRAFT_LOAD_CACHE": cache,
                "DRAFT_LOAD_RESULT": str(result),
            },
            worker_extension_cls=EXTENSION_CLASS,
        )
        if not result.exists():
            raise EngineFailed(f"no worker loaded a draft; the log is {log}")
        return run, Load(**json.loads(result.read_text()))


def measure(
    case: Case,
    repeats: int,
    directory: Path | None,
    logs: Path,
    tick: Tick,
) -> Measured:
    """Run the engines of one case, stock and patched in turn, cold and warm.

    Args:
        case: What to run.
        repeats: Engines of each kind.
        directory: Where the checkpoint is written, by default where temporary files
            are.
        logs: Directory that the engines' logs go to.
        tick: Called with what is done next and how many engines have ended.

    Raises:
        EngineFailed: If an engine does not start or answer.
        OSError: If something can't be written.
    """
    with tempfile.TemporaryDirectory(
        prefix="draft-load-time-", dir=directory
    ) as folder:
        tick("writing the checkpoint", 0)
        model = case.write(Path(folder))
        files = sorted(model.path.glob("*.safetensors"))
        runs: dict[str, list[EngineRun]] = {name: [] for name in SWITCHES}
        loads: dict[str, dict[str, list[Load]]] = {
            cache: {name: [] for name in SWITCHES} for cache in CACHES
        }
        ended = 0
        for number in range(1, repeats + 1):
            for cache in CACHES:
                for name in SWITCHES:
                    tick(f"{cache}, {name}, {number} of {repeats}", ended)
                    log = logs / f"{number}-{cache}-{name}.log"
                    run, load = load_draft(model, name, cache, log)
                    runs[name].append(run)
                    loads[cache][name].append(load)
                    ended += 1
        sizes = {file.name: file.stat().st_size for file in files}
        return Measured(case, model, sizes, unwanted(files), runs, loads)


def table(reports: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the figures as a table for people: medians and the spread of seconds."""
    result = Table(
        title="Loading the draft: seconds without garbage collections (GC), "
        "MiB from disk",
        box=box.SIMPLE_HEAD,
        padding=0,
    )
    for heading in ("case", "cache"):
        result.add_column(heading, no_wrap=True)
    for heading in (
        "seconds\nstock",
        "\npatched",
        "\npart",
        "part\nwith GC",
        "read\nstock",
        "\npatched",
        "\npart",
    ):
        result.add_column(heading, justify="right", no_wrap=True)
    for name, report in reports.items():
        for cache in CACHES:
            figures = report[cache]
            kinds = [figures[kind] for kind in SWITCHES]
            read = figures.get("part_of_bytes")
            result.add_row(
                name,
                cache,
                *(_shown(kind["loading_s"]) for kind in kinds),
                f"{figures['part_of_seconds']:.2f}",
                f"{figures['part_with_collections']:.2f}",
                *(f"{kind['read_mib']['median']:,.1f}" for kind in kinds),
                "" if read is None else f"{read:.2f}",
            )
    return result


def _shown(seconds: Mapping[str, float]) -> str:
    median, least, most = (f"{seconds[key]:.2f}" for key in ("median", "min", "max"))
    return f"{median}\n{least}-{most}"


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write files if asked to; return the exit code."""

    def of_case(name: str, logs: Path, tick: Tick) -> dict[str, Any]:
        case = CASES[name]
        return measure(case, options.repeats, options.directory, logs, tick).to_json()

    def complete(reports: dict[str, dict[str, Any]]) -> dict[str, Any]:
        return {
            **made_with(),
            "prompts": PROMPTS,
            "max_tokens": MAX_TOKENS,
            "repeats": options.repeats,
            "caches": list(CACHES),
            "cases": reports,
        }

    return run_cases(
        options,
        options.cases,
        options.repeats * len(SWITCHES) * len(CACHES),
        of_case,
        table,
        complete,
        draw_load_times,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.draft_load_time",
        description="Measure how long a draft takes to load and what it reads.",
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=CASES,
        default=list(CASES),
        metavar="NAME",
        help=f"some of: {', '.join(CASES)} (default: all)",
    )
    parser.add_argument(
        "--directory",
        type=Path,
        metavar="DIR",
        help="where the checkpoint is written, on the disk that is to be measured "
        "(default: where temporary files are)",
    )
    options = parse(parser, arguments, "write the figures")
    exit_with(lambda: run(options))


if __name__ == "__main__":
    main()
