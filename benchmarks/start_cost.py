# SPDX-License-Identifier: Apache-2.0
"""Measures what the plugin adds to the start of a process that runs vLLM.

`python -m benchmarks.start_cost [--repeats N] [--json FILE]`. Each figure is of fresh
processes: `warm` with the patched files in the cache, `cold` with an empty cache, and
`cold_together` of eight processes that start at once on an empty cache. What vLLM does
itself (finding entry points, resolving its platform) is done before the clock starts.
The package has byte code, as what pip installs does.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.machine import machine, versions
from benchmarks.report import write_report

TOGETHER = 8

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
    return float(output.splitlines()[-1])


def measure(repeats: int, console: Console) -> dict[str, list[float]]:
    """Return the samples of each figure, in milliseconds.

    Args:
        repeats: Processes per figure.
        console: Where progress is shown.

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


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """Return median and spread of samples in milliseconds."""
    return {
        "median_ms": round(statistics.median(samples), 2),
        "min_ms": round(min(samples), 2),
        "max_ms": round(max(samples), 2),
        "samples_ms": [round(sample, 2) for sample in samples],
    }


def main() -> None:
    """Measure, print, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    console = Console(stderr=True)
    samples = measure(options.repeats, console)
    report = {
        **{name: summary(values) for name, values in samples.items()},
        "versions": versions(),
        "machine": machine(),
    }
    for name in samples:
        figures = report[name]
        print(
            f"{name:14} {figures['median_ms']:8.1f} ms"
            f"  ({figures['min_ms']:.1f} to {figures['max_ms']:.1f})"
        )
    if options.json:
        write_report(report, options.json)


if __name__ == "__main__":
    main()
