# SPDX-License-Identifier: Apache-2.0
"""Measures the memory that loading a draft takes, stock and patched, on real engines.

``python -m benchmarks.load_peak [--cases NAME ... | --all] [--json FILE]``. Each case
is a tiny checkpoint that a real engine serves, stock and patched in turn. The figures
are a worker's anonymous memory: before the draft loads, at the peak while it loads, and
after loading, KV cache included. With several ranks they are of the first worker: it
alone logs when its draft begins to load, and each holds an equal part.

Exit code 0: every promise holds. 1: one does not, and is named. 2: an engine failed.

On a CPU vLLM always has the legacy model runner, and the figures say nothing of V2, the
default on GPUs from 0.32 on; a case's ``runner`` says which one it was. Where there is
a GPU, the figures are of the memory that torch allocates on it, in the first rank; what
it reserves, and what is in use on the GPU, are in the report besides. This has not been
run on a GPU so far.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.table import Table

from benchmarks import cuda
from benchmarks.cases import Tick, parse, run_cases
from benchmarks.checkpoints import (
    CountingModel,
    write_deepseek_v3,
    write_eagle,
    write_eagle3,
    write_ernie4_5_moe,
    write_exaone_moe,
    write_glm4_moe,
    write_glm4_moe_lite,
    write_glm_ocr,
    write_qwen3_5,
    write_qwen3_next,
)
from benchmarks.comparison import (
    COUNTERS,
    LOG_PRECISION,
    after_failures,
    fall_failures,
    log_failures,
    output_failures,
)
from benchmarks.engine import EngineRun, run_engine
from benchmarks.loading import NoLoadingWindow, WorkerLoading
from benchmarks.logs import not_allocated_mib
from benchmarks.memory import MIB
from benchmarks.plot import draw_peaks
from benchmarks.plugins import INT8_ROWS, quantize_table, write_plugin
from benchmarks.process import SWITCHES, Environment, exit_with
from benchmarks.report import made_with, spread
from vllm_lean_vocab.estimate import estimate

PROMPTS = 4
MAX_TOKENS = 48
TIMEOUT = 600.0
# The peak above the level before may be this much more than what the draft owns, in
# MiB, where nothing but that has to be allocated.
MOST_ABOVE_LIMIT = 2.0


@dataclass(frozen=True)
class Case:
    """A checkpoint, and how it is served.

    Attributes:
        description: What it is, for people.
        write: Writes it into a directory.
        engine: Arguments of ``run_engine``.
        tables: How many tables the draft has on stock.
        write_stock: Writes the checkpoint that stock serves, if it is another.
        plugin: Source file of a further plugin that the engine needs.
        reaches_limit: Whether loading has to take what the draft owns and hardly
            more. A draft whose weights are rearranged once they are loaded, such as a
            mixture of experts, takes more.
        pull_requests: Those that the patched engine is asked for by id, if not all.
    """

    description: str
    write: Callable[[Path], CountingModel]
    engine: Mapping[str, Any] = field(default_factory=dict)
    tables: int = 2
    write_stock: Callable[[Path], CountingModel] | None = None
    plugin: Path | None = None
    reaches_limit: bool = False
    pull_requests: str | None = None


def write_int8_rows(path: Path, keep_int8: bool = True) -> CountingModel:
    """Write a Qwen3.5 checkpoint whose embedding is rounded to int8 rows.

    Args:
        path: Directory to write to.
        keep_int8: Whether it is stored as int8, or as the same values in bfloat16.
    """
    model = write_qwen3_5(path)
    quantize_table(path, keep_int8)
    return model


SIZES: dict[str, Any] = {"vocab_size": 151_552, "hidden_size": 512}
TWO_LAYERS: dict[str, Any] = {"num_nextn_predict_layers": 2}
TWO_TOKENS: dict[str, Any] = {"num_speculative_tokens": 2}
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2}

# A family more is a line more. Names are identifiers: texts refer to figures by them.
CASES: dict[str, Case] = {
    "qwen3_5": Case("Qwen3.5", write_qwen3_5, reaches_limit=True),
    "qwen3_5_tied": Case(
        "Qwen3.5, tied", partial(write_qwen3_5, tied=True), reaches_limit=True
    ),
    "qwen3_5_tp2": Case("Qwen3.5, tensor parallel 2", write_qwen3_5, TWO_RANKS),
    "qwen3_5_int8": Case(
        "Qwen3.5, int8 embedding",
        write_int8_rows,
        write_stock=partial(write_int8_rows, keep_int8=False),
        plugin=INT8_ROWS,
    ),
    "glm4_moe": Case("GLM-4.5", partial(write_glm4_moe, **SIZES)),
    "glm4_moe_lite": Case(
        "GLM-4.7-Flash, two MTP layers",
        partial(write_glm4_moe_lite, **SIZES, **TWO_LAYERS),
        TWO_TOKENS,
        tables=3,
    ),
    "deepseek_v3": Case("DeepSeek-V3", partial(write_deepseek_v3, **SIZES)),
    "qwen3_next": Case("Qwen3-Next", partial(write_qwen3_next, **SIZES)),
    "ernie4_5_moe": Case("ERNIE 4.5 MoE", partial(write_ernie4_5_moe, **SIZES)),
    "exaone_moe": Case("EXAONE MoE", partial(write_exaone_moe, **SIZES)),
    "eagle": Case(
        "EAGLE", partial(write_eagle, **SIZES), {"method": "eagle"}, tables=1
    ),
    "eagle3": Case(
        "EAGLE3",
        partial(write_eagle3, lm_head="none", **SIZES),
        {"method": "eagle3"},
    ),
    "qwen3_5_moe": Case("Qwen3.5 MoE", partial(write_qwen3_5, moe=True)),
    "qwen3_5_multimodal": Case(
        "Qwen3.5, multimodal", partial(write_qwen3_5, layout="multimodal")
    ),
    "qwen3_5_sharded": Case(
        "Qwen3.5, tables in shards of their own",
        partial(write_qwen3_5, shards="tables"),
    ),
    "qwen3_5_w8a8": Case("Qwen3.5 W8A8", partial(write_qwen3_5, quantization="w8a8")),
    "glm4_moe_two_layers": Case(
        "GLM-4.5, two MTP layers",
        partial(write_glm4_moe, **SIZES, **TWO_LAYERS),
        TWO_TOKENS,
        tables=3,
    ),
    "glm_ocr": Case("GLM-OCR", partial(write_glm_ocr, **SIZES)),
}
DEFAULT_CASES = (
    "qwen3_5",
    "qwen3_5_tied",
    "qwen3_5_tp2",
    "qwen3_5_int8",
    "glm4_moe",
    "glm4_moe_lite",
)


@dataclass(frozen=True)
class Measured:
    """What the engines of one case did.

    Attributes:
        case: The case.
        models: The checkpoint that stock serves, and the one that patched does.
        runs: The engines' results, stock and patched.
        less_bytes: By how many bytes the patched checkpoint is smaller.
        estimated_mib: What ``vllm-lean-vocab estimate`` says of a rank's tables; None
            if it was not asked.
        prompts: How many prompts each engine was sent.
    """

    case: Case
    models: Mapping[str, CountingModel]
    runs: Mapping[str, Sequence[EngineRun]]
    less_bytes: int
    estimated_mib: float | None
    prompts: int = PROMPTS

    @property
    def ranks(self) -> int:
        """Number of ranks that share each table."""
        ranks: int = self.case.engine.get("tensor_parallel_size", 1)
        return ranks

    @property
    def table_mib(self) -> float:
        """MiB of one rank's part of a table in bfloat16."""
        return self.models["stock"].table_bytes / MIB / self.ranks

    @property
    def filled_mib(self) -> float:
        """MiB of one rank's tables that stock fills.

        Of a tied head nothing is ever filled, so resident memory does not show it.
        """
        filled = self.case.tables - int(self.models["stock"].tied)
        return filled * self.table_mib

    @property
    def less_mib(self) -> float:
        """By how many MiB a rank's part of the patched checkpoint is smaller."""
        return self.less_bytes / MIB / self.ranks

    @property
    def draft_owns_mib(self) -> float:
        """MiB of the draft's own tensors per rank, the least that loading takes.

        Those that every rank has a copy of are counted as if they were shared, too.
        Resident memory may grow by less: what was freed before is used again.
        """
        return self.models["patched"].draft_bytes / MIB / self.ranks

    def levels(self, name: str) -> dict[str, dict[str, Any]]:
        """Return the levels of memory in MiB, over all runs of a kind.

        Raises:
            NoLoadingWindow: If a log does not show when the draft was loaded.
        """
        figures = [_figures(run) for run in self.runs[name]]
        keys = [key for key in figures[0] if key.endswith("_mib")]
        return {key: spread([levels[key] for levels in figures]) for key in keys}

    def lower_by(self, *keys: str) -> float:
        """Return by how many MiB levels are lower when patched; the least of them."""
        stock, patched = self.levels("stock"), self.levels("patched")
        differences = (stock[key]["median"] - patched[key]["median"] for key in keys)
        return float(min(differences))

    @property
    def peak_lower_by_mib(self) -> float:
        """How far the peak fell.

        Counted above the level before the draft and in absolute terms; the smaller
        of the two, so that moving the memory elsewhere is no saving.
        """
        return self.lower_by("peak_above_before_mib", "peak_mib")

    @property
    def not_allocated_mib(self) -> list[float]:
        """What each patched engine said it did not allocate, summed over its ranks."""
        return [sum(not_allocated_mib(run.log)) for run in self.runs["patched"]]

    def output_failures(self) -> list[str]:
        """Return every promise about tokens and counters that does not hold."""
        right = {
            name: model.continuations(self.prompts, MAX_TOKENS)
            for name, model in self.models.items()
        }
        return output_failures(self.runs, right)

    def failures(self) -> list[str]:
        """Return every promise that does not hold, as a sentence each."""
        failures = self.output_failures()
        failures += fall_failures(
            "The loading peak", self.peak_lower_by_mib, self.filled_mib
        )
        stock, patched = self.levels("stock"), self.levels("patched")
        if self.case.write_stock is not None:
            failures += fall_failures(
                "Memory after loading", self.lower_by("after_mib"), self.less_mib
            )
        else:
            failures += after_failures(
                stock["after_mib"]["median"], patched["after_mib"]["median"]
            )
        above = patched["peak_above_before_mib"]["median"]
        limit = self.draft_owns_mib + MOST_ABOVE_LIMIT
        if self.case.reaches_limit and above > limit:
            failures.append(
                f"The patched peak is {above:,.1f} MiB above the level before; the "
                f"draft owns {self.draft_owns_mib:,.1f} MiB."
            )
        own = self.case.tables * self.table_mib
        estimated = own if self.estimated_mib is None else self.estimated_mib
        if abs(estimated - own) > LOG_PRECISION:
            failures.append(
                f"The estimate says that {estimated:,.1f} MiB on a rank won't "
                f"be allocated; the tables take {own:,.1f} MiB."
            )
        # The draft uses the target's table as it is.
        tables = self.ranks * (self.case.tables * self.table_mib - self.less_mib)
        return failures + log_failures(self.not_allocated_mib, tables, self.ranks)

    def to_json(self) -> dict[str, Any]:
        """Return figures and verdict, ready for ``json.dump``.

        The figures are of one rank, but for ``not_allocated_mib``. ``identical`` is
        None where no prompts were sent.
        """
        figures = {
            name: {
                **self.levels(name),
                **{counter: getattr(runs[0], counter) for counter in COUNTERS},
            }
            for name, runs in self.runs.items()
        }
        figures["patched"]["not_allocated_mib"] = round(
            median(self.not_allocated_mib), 2
        )
        return {
            "description": self.case.description,
            "runner": self.runs["stock"][0].runner,
            "ranks": self.ranks,
            "table_mib": round(self.table_mib, 2),
            "tables": self.case.tables,
            "estimated_mib": self.estimated_mib,
            "draft_owns_mib": round(self.draft_owns_mib, 2),
            **figures,
            "peak_lower_by_mib": round(self.peak_lower_by_mib, 2),
            "identical": not self.output_failures() if self.prompts else None,
            "failures": self.failures(),
        }


def _figures(run: EngineRun) -> dict[str, Any]:
    """Return the levels of one worker: of its GPU where it has one.

    Raises:
        NoLoadingWindow: If the log does not show when the draft was loaded.
    """
    return run.device[0] if run.device else _first(run).figures()


def _first(run: EngineRun) -> WorkerLoading:
    """Return the memory of the worker that logged when its draft began to load.

    Raises:
        NoLoadingWindow: If none did.
    """
    for worker in run.loading:
        if worker.logged_start:
            return worker
    raise NoLoadingWindow(f"no worker logged both start and end; the log is {run.log}")


def measure(
    case: Case,
    repeats: int,
    logs: Path,
    tick: Tick,
    python: Path | str = sys.executable,
    prompts: int = PROMPTS,
) -> Measured:
    """Run the engines of one case, stock and patched in turn.

    Args:
        case: What to run.
        repeats: Engines of each kind.
        logs: Directory that their logs go to.
        tick: Called with what is done next and how many engines have ended.
        python: The interpreter to run the engines with.
        prompts: How many prompts each is sent; with 0 it loads, and is not used.

    Raises:
        EngineFailed: If an engine does not start or answer.
        OSError: If something can't be written.
    """
    with tempfile.TemporaryDirectory(prefix="load-peak-") as directory:
        tick("writing the checkpoint", 0)
        models = _write(case, Path(directory))
        env: Environment = {}
        if case.plugin is not None:
            name, source = case.plugin.stem, case.plugin.read_text(encoding="utf-8")
            env = {"PYTHONPATH": write_plugin(Path(directory, "site"), name, source)}
        switches: dict[str, Environment] = {
            **SWITCHES,
            "patched": {"VLLM_LEAN_VOCAB": case.pull_requests},
        }
        runs: dict[str, list[EngineRun]] = {name: [] for name in switches}
        for number in range(repeats):
            for position, (name, switch) in enumerate(switches.items()):
                tick(
                    f"{name}, {number + 1} of {repeats}",
                    number * len(switches) + position,
                )
                run = run_engine(
                    models[name].path,
                    prompts=models[name].prompts(prompts),
                    max_tokens=MAX_TOKENS,
                    draft=models[name].draft,
                    log=logs / f"{number + 1}-{name}.log",
                    timeout=TIMEOUT,
                    env={**env, **switch},
                    **cuda.engine_arguments(),
                    python=python,
                    **case.engine,
                )
                runs[name].append(run)
        sizes = {
            name: sum(file.stat().st_size for file in model.path.glob("*.safetensors"))
            for name, model in models.items()
        }
        estimated = None
        if python == sys.executable:
            tick("estimate", repeats * len(SWITCHES))
            estimated = _estimate(models["stock"], case.engine)
    less = sizes["stock"] - sizes["patched"]
    return Measured(case, models, runs, less, estimated, prompts)


def _estimate(model: CountingModel, engine: Mapping[str, Any]) -> float:
    """Return what is said of a draft before it is loaded, in MiB per rank."""
    speculation = {
        "method": engine.get("method", "mtp"),
        "num_speculative_tokens": engine.get("num_speculative_tokens", 1),
        **({"model": str(model.draft)} if model.draft else {}),
    }
    ranks = engine.get("tensor_parallel_size", 1)
    return estimate(str(model.path), speculation, ranks).not_allocated_mib


def _write(case: Case, directory: Path) -> dict[str, CountingModel]:
    """Write the checkpoints of a case; return that of stock and of patched."""
    patched = case.write(directory / "checkpoint")
    if case.write_stock is None:
        return {"stock": patched, "patched": patched}
    return {"stock": case.write_stock(directory / "stock"), "patched": patched}


def table(reports: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the figures as a table for people, medians in MiB."""
    result = Table(
        title="Memory of a worker in MiB: peak above the level before the draft loads, "
        "and what remains",
        box=box.SIMPLE_HEAD,
        padding=0,
    )
    result.add_column("case", no_wrap=True)
    for heading in (
        "peak\nstock",
        "\npatched",
        "draft\nowns",
        "lower\nby",
        "remains\nstock",
        "\npatched",
        "output",
    ):
        result.add_column(heading, justify="right", no_wrap=True)
    for name, report in reports.items():
        stock, patched = report["stock"], report["patched"]
        figures = (
            stock["peak_above_before_mib"]["median"],
            patched["peak_above_before_mib"]["median"],
            report["draft_owns_mib"],
            report["peak_lower_by_mib"],
            stock["after_mib"]["median"],
            patched["after_mib"]["median"],
        )
        outputs = {True: "identical", False: "DIFFERENT", None: "none"}
        output = outputs[report["identical"]]
        result.add_row(name, *(f"{mib:,.1f}" for mib in figures), output)
    return result


def _earlier_cases(report: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return the cases of an earlier report that was made in the same way, if any."""
    if not file.exists():
        return {}
    earlier: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    is_same = all(
        earlier.get(name) == value
        for name, value in report.items()
        if name not in ("date", "cases")
    )
    return dict(earlier["cases"]) if is_same else {}


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write files if asked to; return the exit code."""

    def of_case(name: str, logs: Path, tick: Tick) -> dict[str, Any]:
        return measure(CASES[name], options.repeats, logs, tick).to_json()

    def complete(reports: dict[str, dict[str, Any]]) -> dict[str, Any]:
        report = {
            **made_with(),
            "prompts": PROMPTS,
            "max_tokens": MAX_TOKENS,
            "repeats": options.repeats,
            "cases": reports,
        }
        report["machine"] |= cuda.gpu()
        if options.json:
            report["cases"] = {**_earlier_cases(report, options.json), **reports}
        return report

    return run_cases(
        options,
        options.cases or (list(CASES) if options.all else DEFAULT_CASES),
        options.repeats * len(SWITCHES),
        of_case,
        table,
        complete,
        draw_peaks,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.load_peak",
        description="Measure the memory that loading a draft takes.",
    )
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--cases",
        nargs="+",
        choices=CASES,
        metavar="NAME",
        help=f"some of: {', '.join(CASES)} (default: {', '.join(DEFAULT_CASES)})",
    )
    chosen.add_argument("--all", action="store_true", help="all cases")
    json_help = "write the figures; cases that it has already stay, if measured alike"
    options = parse(parser, arguments, json_help)
    exit_with(lambda: run(options))


if __name__ == "__main__":
    main()
