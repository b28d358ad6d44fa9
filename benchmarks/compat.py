# SPDX-License-Identifier: Apache-2.0
"""Shows what becomes of every pull request on releases of vLLM.

``python -m benchmarks.compat [--releases VERSION ...] [--serve VERSION ...]``, from the
repository's root. Releases are judged by their Python files, which come from their
wheels and are kept in ``.releases/``. What applies has to be sound, too: every changed
file compiles, and every name that the change imports is there. With ``--serve``, tiny
checkpoints are also served on releases that have a CPU build, stock and patched.

Exit code 0: every pull request applies to the supported releases, or is upstream there,
and every promise holds. 1: not so. 2: a release can't be had, or an engine failed.
"""

import argparse
import shlex
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import load_peak, served_release
from benchmarks.engine import EngineFailed
from benchmarks.loading import NoLoadingWindow
from benchmarks.machine import machine, versions
from benchmarks.process import exit_with
from benchmarks.release_environment import interpreter
from benchmarks.release_names import missing_names
from benchmarks.releases import NoRelease, python_files
from benchmarks.report import write_report
from vllm_lean_vocab.plan import make_plan, read_sources
from vllm_lean_vocab.series import SERIES

# The newest patch release of each minor one: `pip index versions vllm`.
RELEASES = ("0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0", "0.34.0")
SUPPORTED = ("0.30.0", "0.31.0", "0.32.0", "0.33.0")
STYLES = {"applies": "green", "upstream": "cyan", "conflict": "red"}

Report = dict[str, Any]


def examine(root: Path) -> Report:
    """Return what becomes of every pull request on a vLLM.

    Args:
        root: Folder that holds the folder `vllm`.

    Returns:
        For each of the `pull_requests` its state, reason and variant, and whatever is
        `unsound` about the files as changed, as a sentence each.

    """
    plan = make_plan(read_sources(root, SERIES), SERIES)
    pull_requests = {
        id: {"state": state, "reason": reason, "variant": variant}
        for id, state, reason, variant in plan.statuses
    }
    unsound = []
    for path, text in plan.files.items():
        try:
            compile(text, path, "exec")
        except SyntaxError as error:
            unsound.append(f"{path}: does not compile: {error}")
    # Imports are read from what compiles.
    unsound = unsound or missing_names(root, plan.files)
    return {"pull_requests": pull_requests, "unsound": unsound}


def examine_release(version: str) -> Report:
    """Return `examine`'s report on a release, and whether it is supported.

    Raises:
        NoRelease: It can't be had.

    """
    report = examine(python_files("vllm", version))
    return {"supported": version in SUPPORTED, **report}


def each(
    names: Sequence[str],
    what: str,
    do: Callable[[str, Callable[[str], None]], Report],
    console: Console,
) -> tuple[dict[str, Report], list[str]]:
    """Do the same for several releases; one that fails doesn't keep the others from it.

    Args:
        names: The releases.
        what: What takes time, shown meanwhile.
        do: Called with a release and what shows what it is at; returns a report.
        console: Where progress is shown.

    Returns:
        The reports by release, and why the others have none.

    """
    reports, failures = {}, []
    with console.status("") as status:
        for name in names:

            def tell(now: str, name: str = name) -> None:
                status.update(f"vLLM {name}: {now}")

            tell(what)
            try:
                reports[name] = do(name, tell)
            except (NoRelease, EngineFailed, NoLoadingWindow) as error:
                failures.append(f"vLLM {name}: {error}")
    return reports, failures


def problems(releases: Mapping[str, Report], served: Mapping[str, Report]) -> list[str]:
    """Return every promise that does not hold, as a sentence each."""
    found = []
    for version, release in releases.items():
        for id, status in release["pull_requests"].items():
            if release["supported"] and status["state"] == "conflict":
                found.append(f"vLLM {version} is supported, but {id} is a conflict.")
        found += [f"vLLM {version}: {sentence}" for sentence in release["unsound"]]
    for version, release in served.items():
        for name, case in release["cases"].items():
            found += [f"vLLM {version}: {name}: {text}" for text in case["failures"]]
    return found


def table(releases: Mapping[str, Report]) -> Table:
    """Return the states of the pull requests for a terminal."""
    ids = (pull_request.id for pull_request in SERIES)
    made = Table("vLLM", *ids, box=box.SIMPLE_HEAD, padding=0)
    if any(not release["supported"] for release in releases.values()):
        made.caption = "* not supported"
    for version, release in releases.items():
        states = [s["state"] for s in release["pull_requests"].values()]
        cells = [f"[{STYLES[state]}]{state}[/]" for state in states]
        made.add_row(version if release["supported"] else f"{version}*", *cells)
    return made


def details(releases: Mapping[str, Report]) -> list[str]:
    """Return why each conflict is one, and which variants were found."""
    return [
        f"vLLM {version}: {id}: {text}"
        for version, release in releases.items()
        for id, status in release["pull_requests"].items()
        for text in (status["reason"], status["variant"])
        if text
    ]


def show_served(served: Mapping[str, Report], output: Console) -> None:
    """Print what the engines did."""
    for version, release in served.items():
        prompts = release["prompts"]
        did = f"{prompts} prompts served" if prompts else "loaded, and no prompts sent"
        output.print(f"vLLM {version} on a CPU, stock and patched: {did}")
        output.print(load_peak.table(release["cases"]))


def run(options: argparse.Namespace) -> int:
    """Examine, serve, print, and write a file if asked to; return the exit code."""
    errors, output = Console(stderr=True), Console()
    logs = Path(tempfile.mkdtemp(prefix="compat-logs-"))

    def serve(version: str, tell: Callable[[str], None]) -> Report:
        python = interpreter(version, shlex.split(options.pip_args))
        return served_release.serve(version, python, logs / version, tell)

    releases, missing = each(
        options.releases, "its Python files", lambda v, _: examine_release(v), errors
    )
    output.print(table(releases))
    for line in details(releases):
        output.print(line, markup=False, highlight=False, soft_wrap=True)
    served, failed = each(options.serve, "its environment", serve, errors)
    show_served(served, output)
    broken = problems(releases, served)
    for line in broken:
        output.print(f"FAILED {line}", style="red", markup=False, soft_wrap=True)
    for line in [*missing, *failed]:
        errors.print(line, style="red", markup=False, soft_wrap=True)
    if options.json:
        report = {
            "date": datetime.now(UTC).date().isoformat(),
            "releases": releases,
            "served": served,
            "versions": versions(),
            "machine": machine(),
        }
        write_report(report, options.json)
    if options.serve and (broken or failed):
        errors.print(f"The engines' logs are in {logs}", soft_wrap=True)
    else:
        shutil.rmtree(logs)
    if missing or failed:
        return 2
    return 1 if broken else 0


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compat",
        description="Show what becomes of every pull request on releases of vLLM.",
    )
    parser.add_argument(
        "--releases",
        nargs="+",
        default=RELEASES,
        metavar="VERSION",
        help=f"default: {' '.join(RELEASES)}",
    )
    parser.add_argument(
        "--serve",
        nargs="+",
        default=[],
        choices=served_release.SERVABLE,
        metavar="VERSION",
        help=f"some of: {', '.join(served_release.SERVABLE)}; each takes an "
        "environment of 3 GiB in .releases/",
    )
    parser.add_argument(
        "--pip-args", default="", metavar="ARGS", help="for these environments"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all of it")
    options = parser.parse_args(arguments)
    exit_with(lambda: run(options))


if __name__ == "__main__":
    main()
