# SPDX-License-Identifier: Apache-2.0
"""Serves a tiny Qwen3.5 + MTP model on the real vLLM, stock and patched.

Run ``python -m benchmarks.demo`` from the repository's root. It ends with code 0 if
the patched server keeps every promise, with 1 if not, with 2 if a server failed.
"""

import argparse
import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.checkpoints import CountingModel, write_qwen3_5
from benchmarks.comparison import Comparison, Serving
from benchmarks.loading import NoLoadingWindow, largest
from benchmarks.memory import MIB
from benchmarks.plot import draw
from benchmarks.process import SWITCHES, Environment, exit_with
from benchmarks.report import made_with
from benchmarks.server import Server, ServerFailed, serving

PROMPTS = 4
MAX_TOKENS = 48
READY_TIMEOUT = 600.0

console = Console()


def main() -> None:
    """Run the demo as the command line says."""
    arguments = _arguments()
    exit_with(lambda: _demo(arguments))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo",
        description="Serve a tiny Qwen3.5 + MTP model, stock and patched.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a PNG")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="keep checkpoint and logs in this directory",
    )
    return parser.parse_args()


def _demo(arguments: argparse.Namespace) -> int:
    """Write the checkpoint, serve it twice, compare; return the exit code."""
    with _workplace(arguments.keep) as directory:
        with console.status("Writing the checkpoint"):
            started = time.monotonic()
            model = write_qwen3_5(directory / "checkpoint")
        console.print(
            f"Checkpoint: Qwen3.5 + MTP, vocabulary {model.vocab_size:,}, two tables "
            f"of {model.table_bytes / MIB:,.1f} MiB "
            f"({time.monotonic() - started:.1f} s)"
        )
        runs: dict[str, Serving] = {}
        for name, switch in SWITCHES.items():
            log = directory / f"{name}.log"
            try:
                runs[name] = _serve(name, switch, model, log)
            except (ServerFailed, NoLoadingWindow) as error:
                _explain(name, error, log, keep=arguments.keep is not None)
                return 2
        comparison = Comparison(
            **runs, expected=_expected(model), table_bytes=model.table_bytes
        )
    _print(comparison)
    report = _report(comparison)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(_dump(report))
        console.print(f"Figures: {arguments.json}")
    if arguments.plot:
        arguments.plot.parent.mkdir(parents=True, exist_ok=True)
        draw(report, arguments.plot)
        console.print(f"Plot: {arguments.plot}")
    return 1 if comparison.failures() else 0


@contextlib.contextmanager
def _workplace(keep: Path | None) -> Iterator[Path]:
    """Yield the directory to keep, or one that is removed afterwards."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="lean-vocab-demo-") as directory:
        yield Path(directory)


def _serve(name: str, switch: Environment, model: CountingModel, log: Path) -> Serving:
    """Start a server, send it the prompts one at a time, and end it.

    Raises:
        ServerFailed: If it does not start or answer.
        NoLoadingWindow: If its log does not show when the draft was loaded.
    """
    with (
        console.status("") as status,
        serving(model.path, env=switch, log=log) as server,
    ):
        started = time.monotonic()

        def tick() -> None:
            seconds = time.monotonic() - started
            stage = "the draft is loaded" if _loaded(server) else "starting"
            status.update(f"{name}: vllm serve, {stage} ({seconds:.0f} s)")

        server.wait_until_ready(READY_TIMEOUT, tick)
        ready = time.monotonic() - started
        console.print(f"{name}: ready after {ready:.0f} s")
        settled = server.settled_memory()
        completions = []
        for number, prompt in enumerate(model.prompts(PROMPTS), start=1):
            status.update(f"{name}: prompt {number} of {PROMPTS}")
            completions.append(server.complete(_text(prompt), MAX_TOKENS))
        counters, version = server.counters(), server.version()
        worker = largest(server.process.loading(settled))
        status.update(f"{name}: ending the server")
    return Serving(version, completions, counters, worker, ready)


def _loaded(server: Server) -> bool:
    return any(not marker.opens for marker in server.process.log.markers)


def _text(token_ids: list[int]) -> str:
    return " ".join(map(str, token_ids))


def _expected(model: CountingModel) -> list[list[str]]:
    answers = model.continuations(PROMPTS, MAX_TOKENS)
    return [_text(answer).split() for answer in answers]


def _explain(name: str, error: Exception, log: Path, *, keep: bool) -> None:
    """Say what went wrong, with the end of the log and where all of it is."""
    if not keep:
        # The directory that it is in is about to be removed.
        handle, kept = tempfile.mkstemp(prefix=f"lean-vocab-{name}-", suffix=".log")
        with open(handle, "wb") as copy, log.open("rb") as original:
            shutil.copyfileobj(original, copy)
        log = Path(kept)
    lines = log.read_text(errors="replace").splitlines()[-30:]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    console.print(f"[bold red]The {name} server failed:[/] {error}")
    console.print(f"The full log is {log}", soft_wrap=True)


def _print(comparison: Comparison) -> None:
    """Print the table and the verdict."""
    table = Table(title=f"vLLM {comparison.stock.vllm}, one worker, tokens at T=0")
    table.add_column("")
    for heading in ("stock", "patched", "difference"):
        table.add_column(heading, justify="right")
    for row in comparison.rows():
        table.add_row(*row)
    console.print(table)
    failures = comparison.failures()
    for failure in failures:
        console.print(f"[bold red]FAILED[/] {failure}")
    if not failures:
        saved, tables = comparison.saved, 2 * comparison.table_bytes
        console.print(
            f"[bold green]OK[/] The peak is lower by {saved / MIB:,.1f} MiB; the two "
            f"tables take {tables / MIB:,.1f} MiB. Text, usage, drafts and accepted "
            "tokens are the same."
        )
        if saved > 1.5 * tables:
            console.print(
                "On this processor vLLM also keeps a repacked copy of every table for "
                "its matrix kernels; the draft's copies are gone as well."
            )


def _report(comparison: Comparison) -> dict[str, Any]:
    return {
        **made_with(),
        "request": {"prompts": PROMPTS, "max_tokens": MAX_TOKENS, "temperature": 0},
        **comparison.to_json(),
    }


def _dump(report: dict[str, Any]) -> str:
    """Return readable JSON with the samples of a run on one line."""
    report = json.loads(json.dumps(report))
    samples = {}
    for name in SWITCHES:
        mark = f"<samples of {name}>"
        samples[mark] = json.dumps(report[name]["samples"], separators=(",", ":"))
        report[name]["samples"] = mark
    text = json.dumps(report, indent=2)
    for mark, values in samples.items():
        text = text.replace(json.dumps(mark), values)
    return text + "\n"


if __name__ == "__main__":
    main()
