# SPDX-License-Identifier: Apache-2.0
"""Measures what the plugin adds to the start of a process, and of ``vllm serve``.

``python -m benchmarks.start_cost [--no-serve] [--json FILE] [--plot FILE]``. Each
figure in milliseconds is of fresh processes: ``warm`` with the patched files in the
cache, ``cold`` with an empty cache, and ``cold_together`` of eight processes that start
at once on an empty cache. What vLLM does itself (finding entry points, resolving its
platform) is done before the clock starts. The package has byte code, as what pip
installs does.

``serve_ready`` is how long ``vllm serve`` takes to answer on ``/health``, in seconds:
of a tiny Qwen3.5 with an MTP head, on a warm cache, stock and patched in turn. The
patched server also has less to load, so that the difference may be negative.

Exit code 0: every promise holds. 1: one does not, and is named. 2: a process or a
server failed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.checkpoints import write_qwen3_5
from benchmarks.plot import draw_start_cost
from benchmarks.process import SWITCHES, Environment, exit_with
from benchmarks.report import made_with, spread, write_report
from benchmarks.server import ServerFailed, serving

TOGETHER = 8
# What a process may take at most, in milliseconds: the medians.
MOST_MS = {"warm": 15.0, "cold": 2000.0, "cold_together": 2000.0}
# Of the model that is served: loading it takes no time to speak of.
VOCAB_SIZE = 32_768
READY_TIMEOUT = 600.0
# Seconds between two tries whether the server is ready.
PAUSE = 0.02

PROCESS = """
import sys, time
import vllm.envs, vllm.plugins
from importlib.metadata import entry_points
from vllm.platforms import current_platform
current_platform.is_out_of_tree()
[entry] = [e for e in entry_points(group="vllm.general_plugins")
           if e.name == "lean_vocab"]
start = time.perf_counter()
entry.load()()
milliseconds = (time.perf_counter() - start) * 1000
from vllm_lean_vocab.importer import PatchedFinder
assert any(isinstance(finder, PatchedFinder) for finder in sys.meta_path)
print(milliseconds)
"""


def start(cache: Path) -> subprocess.Popen[str]:
    """Start a process that measures the plugin once, with this cache root."""
    env = {**os.environ, "VLLM_CACHE_ROOT": str(cache)}
    for name in ("VLLM_LEAN_VOCAB", "PYTHONDONTWRITEBYTECODE"):
        env.pop(name, None)
    return subprocess.Popen(
        [sys.executable, "-c", PROCESS], env=env, stdout=subprocess.PIPE, text=True
    )


def milliseconds(process: subprocess.Popen[str]) -> float:
    """Return what a started process measured, in milliseconds.

    Raises:
        RuntimeError: The process failed; it has said why on stderr.

    """
    output, _ = process.communicate(timeout=300)
    if process.returncode != 0:
        raise RuntimeError("the measuring process failed, see above")
    return round(float(output.splitlines()[-1]), 2)


def measure(repeats: int, console: Console) -> dict[str, list[float]]:
    """Return the samples of each figure, in milliseconds.

    Args:
        repeats: Processes per figure.
        console: Where progress is shown.

    Raises:
        RuntimeError: A process failed.

    """
    samples: dict[str, list[float]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory() as cache:  # not counted: it writes byte code
        milliseconds(start(Path(cache)))
    for _ in track(range(repeats), "cold and warm", console=console):
        with tempfile.TemporaryDirectory() as cache:
            for name in ("cold", "warm"):
                samples[name].append(milliseconds(start(Path(cache))))
    with (
        console.status(f"{TOGETHER} together on a cold cache"),
        tempfile.TemporaryDirectory() as cache,
    ):
        processes = [start(Path(cache)) for _ in range(TOGETHER)]
        samples["cold_together"] = [milliseconds(process) for process in processes]
    return samples


def measure_serve(repeats: int, console: Console) -> dict[str, list[float]]:
    """Return how long servers took to be ready, in seconds, stock and patched.

    Args:
        repeats: Servers of each kind.
        console: Where progress is shown.

    Raises:
        ServerFailed: A server does not start; the message ends with its log.

    """
    samples: dict[str, list[float]] = {name: [] for name in SWITCHES}
    with tempfile.TemporaryDirectory(prefix="start-cost-") as directory:
        folder = Path(directory)
        model = write_qwen3_5(folder / "checkpoint", vocab_size=VOCAB_SIZE).path
        cache = {"VLLM_CACHE_ROOT": str(folder / "cache")}
        with console.status("vllm serve, not counted: it fills the caches"):
            _seconds_to_ready(model, {**SWITCHES["patched"], **cache}, folder)
        for _ in track(range(repeats), "vllm serve", console=console):
            for name, switch in SWITCHES.items():
                seconds = _seconds_to_ready(model, {**switch, **cache}, folder)
                samples[name].append(round(seconds, 2))
    return samples


def _seconds_to_ready(model: Path, env: Environment, folder: Path) -> float:
    started = time.monotonic()
    with serving(model, env=env, log=folder / "log") as server:
        try:
            server.wait_until_ready(READY_TIMEOUT, pause=PAUSE)
        except ServerFailed as error:
            raise ServerFailed(f"{error}\n{server.process.log.tail()}") from None
        return time.monotonic() - started


def serve_ready(samples: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return what the plugin adds until a server is ready, in seconds.

    Args:
        samples: What `measure_serve` returns.

    """
    stock, patched = (spread(samples[name]) for name in ("stock", "patched"))
    return {
        "stock_s": stock,
        "patched_s": patched,
        "difference_s": round(patched["median"] - stock["median"], 2),
        # What is within this is no difference that was seen.
        "spread_of_stock_s": round(stock["max"] - stock["min"], 2),
    }


def failures(samples: Mapping[str, Sequence[float]]) -> list[str]:
    """Return every promise that does not hold, as a sentence each.

    Args:
        samples: What `measure` returns.

    """
    medians = {name: spread(samples[name])["median"] for name in MOST_MS}
    return [
        f"{name}: the median is {medians[name]:,.1f} ms; at most {most:,.0f} ms were "
        "promised."
        for name, most in MOST_MS.items()
        if medians[name] > most
    ]


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write files if asked to; return the exit code."""
    errors, output = Console(stderr=True), Console()
    try:
        samples = measure(options.repeats, errors)
        servers = measure_serve(options.servers, errors) if options.serve else None
    except (RuntimeError, OSError) as error:
        errors.print(str(error), markup=False, soft_wrap=True)
        return 2
    broken = failures(samples)
    report = {
        **made_with(),
        **{f"{name}_ms": spread(values) for name, values in samples.items()},
        **({"serve_ready": serve_ready(servers)} if servers else {}),
        "promised_ms": MOST_MS,
        "failures": broken,
    }
    for line in lines(report):
        output.print(line, highlight=False, soft_wrap=True)
    for failure in broken:
        output.print(f"[bold red]FAILED[/] {failure}", soft_wrap=True)
    if options.json:
        write_report(report, options.json)
    if options.plot:
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        draw_start_cost(report, options.plot)
    if broken:
        return 1
    output.print("[bold green]OK[/] Every promise holds.")
    return 0


def lines(report: Mapping[str, Any]) -> list[str]:
    """Return a report's figures as lines for people: medians, least and most."""
    result = [
        f"{name:14} {_spread(report[f'{name}_ms'], ',.1f', 'ms')}"
        f", at most {most:,.0f} ms promised"
        for name, most in MOST_MS.items()
    ]
    if ready := report.get("serve_ready"):
        result += [
            f"{'ready ' + name:14} {_spread(ready[f'{name}_s'], '.2f', 's')}"
            for name in ("stock", "patched")
        ]
        result.append(
            f"{'difference':14} {ready['difference_s']:+8.2f} s; stock alone varies by "
            f"{ready['spread_of_stock_s']:.2f} s"
        )
    return result


def _spread(figures: Mapping[str, Any], form: str, unit: str) -> str:
    least, most = (format(figures[name], form) for name in ("min", "max"))
    return f"{format(figures['median'], form):>8} {unit} ({least} to {most})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.start_cost",
        description="Measure what the plugin adds to the start of vLLM.",
    )
    parser.add_argument("--repeats", type=int, default=7, metavar="N")
    parser.add_argument(
        "--servers", type=int, default=3, metavar="N", help="of each kind (default: 3)"
    )
    parser.add_argument(
        "--no-serve", dest="serve", action="store_false", help="start no server"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a PNG")
    options = parser.parse_args(arguments)
    if min(options.repeats, options.servers) < 1:
        parser.error("--repeats and --servers have to be 1 or more")
    exit_with(lambda: run(options))


if __name__ == "__main__":
    main()
