# SPDX-License-Identifier: Apache-2.0
"""What measurements that go case by case, with engines for each, have in common."""

import argparse
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.engine import EngineFailed
from benchmarks.loading import NoLoadingWindow
from benchmarks.report import write_report
from vllm_lean_vocab.estimate import CantEstimate

# Is told what is done next and how many engines of the case have ended.
Tick = Callable[[str, int], None]


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, json_help: str
) -> argparse.Namespace:
    """Add the options that all have to a command line's, and parse it.

    Args:
        parser: Has the other options.
        arguments: Those after the command's name; None for this process's.
        json_help: What ``--json`` does.
    """
    parser.add_argument("--repeats", type=int, default=2, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help=json_help)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a PNG")
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error("--repeats has to be 1 or more")
    return options


def measure_cases(
    names: Sequence[str],
    engines: int,
    measure: Callable[[str, Tick], dict[str, Any]],
    console: Console,
) -> dict[str, dict[str, Any]]:
    """Measure cases; one that fails does not keep the others from being measured.

    Args:
        names: Names of the cases.
        engines: How many engines each takes.
        measure: Returns the report of a case.
        console: Where progress and errors are shown.

    Returns:
        The report of each case that was measured, by name.
    """
    reports: dict[str, dict[str, Any]] = {}
    with Progress(console=console) as progress:
        task = progress.add_task("", total=engines * len(names))
        for position, name in enumerate(names):

            def tick(
                what: str, ended: int, name: str = name, before: int = position
            ) -> None:
                progress.update(
                    task,
                    description=f"{name}: {what}",
                    completed=before * engines + ended,
                )

            try:
                reports[name] = measure(name, tick)
            except (EngineFailed, NoLoadingWindow, CantEstimate) as error:
                console.print(f"{name}: {error}", markup=False, soft_wrap=True)
        progress.update(task, description="done", completed=engines * len(names))
    return reports


def run_cases(
    options: argparse.Namespace,
    names: Sequence[str],
    engines: int,
    measure: Callable[[str, Path, Tick], dict[str, Any]],
    table: Callable[[Mapping[str, Mapping[str, Any]]], Table],
    complete: Callable[[dict[str, dict[str, Any]]], dict[str, Any]],
    draw: Callable[[dict[str, Any], Path], None],
) -> int:
    """Measure cases, print, and write files if asked to.

    Args:
        options: The command line's ``json`` and ``plot``.
        names: Names of the cases.
        engines: How many engines each takes.
        measure: Returns the report of a case; is given a directory for its logs.
        table: Returns the figures for people.
        complete: Returns the whole report, of those of the cases.
        draw: Writes a PNG of it.

    Returns:
        Exit code 0: every promise holds. 1: one does not. 2: an engine failed.
    """
    logs = Path(tempfile.mkdtemp(prefix="benchmark-logs-"))
    errors, output = Console(stderr=True), Console()
    reports = measure_cases(
        names, engines, lambda name, tick: measure(name, logs / name, tick), errors
    )
    output.print(table(reports))
    broken = [(name, text) for name in reports for text in reports[name]["failures"]]
    for name, failure in broken:
        output.print(f"[bold red]FAILED[/] {name}: {failure}", soft_wrap=True)
    report = complete(reports)
    if options.json:
        write_report(report, options.json)
    if options.plot and reports:
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        draw(report, options.plot)
    if broken or len(reports) < len(names):
        errors.print(f"The engines' logs are in {logs}", soft_wrap=True)
        return 1 if len(reports) == len(names) else 2
    shutil.rmtree(logs)
    output.print("[bold green]OK[/] Every promise holds.")
    return 0
