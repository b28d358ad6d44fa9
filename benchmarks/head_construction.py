# SPDX-License-Identifier: Apache-2.0
"""Measures what building one GLM MTP `SharedHead` allocates, stock and patched.

`python -m benchmarks.head_construction [--json FILE] [--plot FILE]`. Each figure is
of a fresh process, stock and patched in turn, that builds the module as vLLM's GLM-4
MTP layer does: on stock with a head of its own, patched with a deferred one. The
default shape is GLM-4.5-Air's. On a CPU the peak is that of torch's `MemTracker`, which
counts what was asked for even if no page of it was touched. On CUDA the peaks are the
allocator's, of allocated and of reserved memory; there it has not been run so far.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.memory import MIB
from benchmarks.plot import draw_heads
from benchmarks.report import made_with, spread, write_report

VOCAB_SIZE = 151_552
HIDDEN_SIZE = 4096
SWITCHES = {"stock": "0", "patched": "glm_mtp"}


def build(vocab_size: int, hidden_size: int) -> dict[str, Any]:
    """Build one `SharedHead` in this process, in bfloat16 and on one rank.

    Relies on `vllm.model_executor.models.glm4_moe_mtp.SharedHead`.

    Args:
        vocab_size: Rows of the head.
        hidden_size: Columns of the head.

    Returns:
        Class of the head, device, and peaks in MiB above the level before:
        `allocated_mib`, and on CUDA `reserved_mib`.

    """
    import torch
    from torch.distributed._tools.mem_tracker import MemTracker

    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from transformers import PretrainedConfig

    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.models.glm4_moe_mtp import SharedHead

    deferred = os.environ["VLLM_LEAN_VOCAB"] != SWITCHES["stock"]
    options: dict[str, Any] = {"defer_lm_head": True} if deferred else {}
    config = PretrainedConfig(
        vocab_size=vocab_size, hidden_size=hidden_size, rms_norm_eps=1e-5
    )
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
        initialize_model_parallel()
        torch.set_default_dtype(torch.bfloat16)
        if (accelerator := torch.accelerator.current_accelerator(True)) is not None:
            device = accelerator.type
            memory = torch.accelerator
            before = memory.memory_allocated(), memory.memory_reserved()
            memory.reset_peak_memory_stats()
            with accelerator:
                module = SharedHead(config, "model.layers.46", **options)
            peaks = {
                "allocated_mib": memory.max_memory_allocated() - before[0],
                "reserved_mib": memory.max_memory_reserved() - before[1],
            }
        else:
            device = "cpu"
            with MemTracker() as tracker:
                module = SharedHead(config, "model.layers.46", **options)
            [snapshot] = tracker.get_tracker_snapshot("peak").values()
            peaks = {"allocated_mib": snapshot["Total"]}
    return {
        "head": type(module.head).__name__,
        "device": device,
        **{name: peak / MIB for name, peak in peaks.items()},
    }


def build_in_a_process(switch: str, shape: tuple[int, int]) -> dict[str, Any]:
    """Return what `build` returns in a fresh process.

    Args:
        switch: Value of `VLLM_LEAN_VOCAB`.
        shape: Rows and columns of the head.

    Raises:
        RuntimeError: The process failed; what it wrote is the message.

    """
    script = (
        "import json; from benchmarks.head_construction import build; "
        f"print(json.dumps(build{shape}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "VLLM_LEAN_VOCAB": switch},
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{done.stdout}{done.stderr}"[-3000:])
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(
    shape: tuple[int, int], repeats: int, console: Console
) -> dict[str, list[dict[str, Any]]]:
    """Return what each process measured, stock and patched.

    Args:
        shape: Rows and columns of the head.
        repeats: Processes of each kind.
        console: Where progress is shown.

    """
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in SWITCHES}
    for _ in track(range(repeats), "stock and patched", console=console):
        for name, switch in SWITCHES.items():
            samples[name].append(build_in_a_process(switch, shape))
    return samples


def summary(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Return head and device, and median and spread of each peak in MiB."""
    first = samples[0]
    peaks = {
        name: spread([sample[name] for sample in samples])
        for name in first
        if name.endswith("_mib")
    }
    return {"head": first["head"], "device": first["device"], **peaks}


def main() -> None:
    """Measure, print, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    parser.add_argument("--hidden-size", type=int, default=HIDDEN_SIZE)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a PNG")
    options = parser.parse_args()
    shape = options.vocab_size, options.hidden_size
    samples = measure(shape, options.repeats, Console(stderr=True))
    report = {
        **made_with(),
        "vocab_size": options.vocab_size,
        "hidden_size": options.hidden_size,
        "dtype": "bfloat16",
        **{name: summary(values) for name, values in samples.items()},
    }
    for name in SWITCHES:
        for peak, figures in report[name].items():
            if peak.endswith("_mib"):
                print(
                    f"{name:8} {report[name]['head']:15} {peak.removesuffix('_mib')} "
                    f"{figures['median']:9,.3f} MiB"
                    f"  ({figures['min']:,.3f} to {figures['max']:,.3f})"
                )
    if options.json:
        write_report(report, options.json)
    if options.plot:
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        draw_heads(report, options.plot)


if __name__ == "__main__":
    main()
