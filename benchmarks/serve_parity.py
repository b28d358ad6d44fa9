# SPDX-License-Identifier: Apache-2.0
"""Compares ``vllm serve`` under load, stock and patched: answers and throughput.

``python -m benchmarks.serve_parity [--repeats N] [--json FILE] [--plot FILE]``. Servers
of a tiny Qwen3.5 with an MTP head are started in turn, stock and patched. Each is sent
the same prompts twice over, at temperature zero:

- one at a time: text, token usage, drafts and accepted draft tokens are to be the same
  on all servers, and the text the known continuation;
- by several clients at once: text and usage of each request are to be the same. Drafts
  are not compared here: how requests are batched depends on when they arrive, and with
  it how often the draft is asked, on stock as well.

Throughput is completion tokens per second of the second part, from the first request to
the last answer. Stock and patched servers that follow each other are a pair, and the
ratio is that of a pair. It counts as the same throughput if 1 lies within the spread of
the ratios, or if their median is no farther from 1 than stock's own samples are from
stock's median. Of one pair there is no spread, and nothing is said.

Exit code 0: every promise holds. 1: one does not, and is named. 2: a server failed.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.checkpoints import CountingModel, write_qwen3_5
from benchmarks.comparison import COUNTERS, counter_failures, log_failures
from benchmarks.logs import not_allocated_mib
from benchmarks.memory import MIB
from benchmarks.plot import draw_parity
from benchmarks.process import SWITCHES, Environment, exit_with
from benchmarks.report import made_with, spread, write_report
from benchmarks.server import (
    Completion,
    Server,
    ServerFailed,
    SpeculativeCounters,
    serving,
)

READY_TIMEOUT = 600.0
# Vocabulary tables of the draft.
TABLES = 2
# The parts of what a server is sent, and how.
PARTS = {"alone": "one at a time", "together": "together"}


@dataclass(frozen=True)
class Load:
    """What every server is asked.

    Attributes:
        prompts: Prompts sent one at a time.
        requests: Prompts sent by all clients together.
        clients: How many of these are under way at once.
        max_tokens: Tokens generated for each.
    """

    prompts: int
    requests: int
    clients: int
    max_tokens: int


@dataclass(frozen=True)
class Served:
    """What one server did.

    Attributes:
        alone: Its answers to the prompts that were sent one at a time.
        counters: Its counters of speculative decoding after these.
        together: Its answers to the others, in the order of the prompts.
        seconds: From the first of the others to the last answer.
        not_allocated_mib: What its log says was not allocated for the draft, in MiB.
    """

    alone: list[Completion]
    counters: SpeculativeCounters
    together: list[Completion]
    seconds: float
    not_allocated_mib: float

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens per second under load."""
        tokens = sum(answer.usage["completion_tokens"] for answer in self.together)
        return float(tokens / self.seconds)


@dataclass(frozen=True)
class Parity:
    """Servers that were asked the same, stock and patched in turn.

    Attributes:
        load: What they were asked.
        runs: What each did, stock and patched, in the order in which they ran.
        model: The checkpoint, which needs not be there any more.
    """

    load: Load
    runs: Mapping[str, Sequence[Served]]
    model: CountingModel

    @property
    def ratios(self) -> list[float]:
        """Throughput of patched by that of stock, for each pair."""
        pairs = zip(self.runs["stock"], self.runs["patched"], strict=True)
        return [
            patched.tokens_per_second / stock.tokens_per_second
            for stock, patched in pairs
        ]

    @property
    def throughput_is_the_same(self) -> bool | None:
        """Whether it is within its spread; None if there is none."""
        ratios = spread(self.ratios)
        if len(self.ratios) < 2:
            return None
        if ratios["min"] <= 1 <= ratios["max"]:
            return True
        return bool(abs(ratios["median"] - 1) <= self.spread_of_stock)

    @property
    def spread_of_stock(self) -> float:
        """How far stock's samples are from their median, as a part of that."""
        stock = spread([run.tokens_per_second for run in self.runs["stock"]])
        middle = stock["median"]
        return float(max(stock["max"] - middle, middle - stock["min"]) / middle)

    def output_failures(self) -> list[str]:
        """Return every promise about answers and counters that does not hold."""
        failures = []
        for name, runs in self.runs.items():
            for part, when in PARTS.items():
                known = self._known(part)
                wrong = sum(
                    answer.text.split() != words
                    for run in runs
                    for answer, words in zip(getattr(run, part), known, strict=True)
                )
                if wrong:
                    failures.append(
                        f"{wrong} answers of the {name} servers to prompts sent {when} "
                        "are not the known continuation."
                    )
        every = [*self.runs["stock"], *self.runs["patched"]]
        for part, when in PARTS.items():
            for what in ("text", "usage"):
                answers = [
                    [getattr(answer, what) for answer in getattr(run, part)]
                    for run in every
                ]
                if any(answer != answers[0] for answer in answers):
                    failures.append(
                        f"The {what} of prompts sent {when} differs between servers."
                    )
        counters = {
            name: [run.counters for run in runs] for name, runs in self.runs.items()
        }
        return failures + counter_failures(counters)

    def _known(self, part: str) -> list[list[str]]:
        """Return the words of the known answers to one part of the prompts."""
        number = self.load.prompts if part == "alone" else self.load.requests
        answers = self.model.continuations(number, self.load.max_tokens)
        return [_words(token_ids) for token_ids in answers]

    def failures(self) -> list[str]:
        """Return every promise that does not hold, as a sentence each."""
        failures = self.output_failures()
        failures += log_failures(
            [run.not_allocated_mib for run in self.runs["patched"]],
            TABLES * self.model.table_bytes / MIB,
        )
        if self.throughput_is_the_same is False:
            ratios = spread(self.ratios)
            failures.append(
                f"Throughput differs: patched is {ratios['median']:.3f} of stock "
                f"({ratios['min']:.3f} to {ratios['max']:.3f}), and stock itself is "
                f"within {self.spread_of_stock:.3f} of its median."
            )
        return failures

    def to_json(self) -> dict[str, Any]:
        """Return figures and verdict, ready for ``json.dump``."""
        figures = {
            name: {
                "tokens_per_second": spread(
                    [round(run.tokens_per_second, 2) for run in runs]
                ),
                "seconds": spread([round(run.seconds, 3) for run in runs]),
                **{counter: getattr(runs[0].counters, counter) for counter in COUNTERS},
            }
            for name, runs in self.runs.items()
        }
        return {
            "prompts": self.load.prompts,
            "requests": self.load.requests,
            "clients": self.load.clients,
            "max_tokens": self.load.max_tokens,
            "repeats": len(self.ratios),
            **figures,
            "ratio": spread([round(ratio, 4) for ratio in self.ratios]),
            "spread_of_stock": round(self.spread_of_stock, 4),
            "throughput_is_the_same": self.throughput_is_the_same,
            "identical": not self.output_failures(),
            "failures": self.failures(),
        }


def _words(token_ids: Sequence[int]) -> list[str]:
    """Return what a counting model's tokens are as text, word by word."""
    return [str(token_id) for token_id in token_ids]


def serve(
    model: CountingModel,
    switch: Environment,
    load: Load,
    log: Path,
    tick: Callable[[str], None],
) -> Served:
    """Start a server, send it all prompts, and end it.

    Args:
        model: The checkpoint.
        switch: What makes the server stock or patched.
        load: What it is asked.
        log: File that its output goes to.
        tick: Called with what is done next.

    Raises:
        ServerFailed: If it does not start or answer.
        OSError: If something can't be written.
    """
    with serving(model.path, env=switch, log=log) as server:
        tick("starting")
        server.wait_until_ready(READY_TIMEOUT)
        tick("one prompt at a time")
        alone = [
            server.complete(" ".join(_words(prompt)), load.max_tokens)
            for prompt in model.prompts(load.prompts)
        ]
        counters = server.counters()
        tick(f"{load.clients} clients at once")
        started = time.monotonic()
        together = _together(server, model, load)
        seconds = time.monotonic() - started
    left_out = sum(not_allocated_mib(log))
    return Served(alone, counters, together, seconds, left_out)


def _together(server: Server, model: CountingModel, load: Load) -> list[Completion]:
    """Send prompts by several clients at once; return the answers in their order.

    Raises:
        ServerFailed: If one is not answered.
    """
    prompts = [" ".join(_words(prompt)) for prompt in model.prompts(load.requests)]
    clients = ThreadPoolExecutor(load.clients)
    try:
        answers = clients.map(
            lambda prompt: server.complete(prompt, load.max_tokens), prompts
        )
        return list(answers)
    finally:
        # Not waited for: the server ends next, and so do requests that are under way.
        clients.shutdown(wait=False, cancel_futures=True)


def measure(
    load: Load, vocab_size: int, repeats: int, logs: Path, console: Console
) -> Parity:
    """Serve a checkpoint, stock and patched in turn.

    Args:
        load: What each server is asked.
        vocab_size: Rows of the checkpoint's tables.
        repeats: Servers of each kind.
        logs: Directory that their logs go to.
        console: Where progress is shown.

    Raises:
        ServerFailed: If a server does not start or answer; the message has the end of
            its log.
        OSError: If something can't be written.
    """
    runs: dict[str, list[Served]] = {name: [] for name in SWITCHES}
    with (
        tempfile.TemporaryDirectory(prefix="serve-parity-") as directory,
        Progress(console=console) as progress,
    ):
        task = progress.add_task(
            "writing the checkpoint", total=repeats * len(SWITCHES)
        )
        model = write_qwen3_5(Path(directory), vocab_size=vocab_size)
        for number in range(1, repeats + 1):
            # Each is first as often as the other: a machine may get slower.
            order = [*SWITCHES.items()][:: 1 if number % 2 else -1]
            for name, switch in order:

                def tick(what: str, of: str = f"{name}, {number} of {repeats}") -> None:
                    progress.update(task, description=f"{of}: {what}")

                log = logs / f"{number}-{name}.log"
                try:
                    runs[name].append(serve(model, switch, load, log, tick))
                except ServerFailed as error:
                    lines = log.read_text(errors="replace").splitlines()[-30:]
                    end = "\n".join(lines)
                    raise ServerFailed(f"{end}\n{name}: {error}") from error
                progress.advance(task)
        progress.update(task, description="done")
        return Parity(load, runs, model)


def table(report: Mapping[str, Any]) -> Table:
    """Return the figures as a table for people."""
    result = Table(
        title=f"vllm serve {report['vllm']}, {report['requests']} requests by "
        f"{report['clients']} clients, {report['max_tokens']} tokens each",
        caption=f"Drafts are those of {report['prompts']} prompts sent one at a time.",
        box=box.SIMPLE_HEAD,
        padding=0,
    )
    result.add_column("")
    for heading in ("stock", "patched", "patched / stock"):
        result.add_column(heading, justify="right")
    kinds = [report[name] for name in SWITCHES]
    result.add_row(
        "Completion tokens/s",
        *(_shown(kind["tokens_per_second"], 1) for kind in kinds),
        _shown(report["ratio"], 3),
    )
    for counter, what in COUNTERS.items():
        stock, patched = (kind[counter] for kind in kinds)
        same = "identical" if stock == patched else "DIFFERENT"
        label = what.removeprefix("The number of ").capitalize()
        result.add_row(label, f"{stock:,}", f"{patched:,}", same)
    return result


def _shown(figures: Mapping[str, float], digits: int) -> str:
    median, least, most = (
        f"{figures[name]:,.{digits}f}" for name in ("median", "min", "max")
    )
    return f"{median}\n{least}-{most}"


def verdict(report: Mapping[str, Any]) -> str:
    """Return what a report without failures says, as a sentence."""
    answers = "Text and usage are the same, and drafts where prompts come one by one."
    if report["throughput_is_the_same"] is None:
        return f"{answers} One pair says nothing of throughput."
    return f"{answers} Throughput is the same within its spread."


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write files if asked to; return the exit code."""
    logs = Path(tempfile.mkdtemp(prefix="serve-parity-logs-"))
    errors, output = Console(stderr=True), Console()
    load = Load(options.prompts, options.requests, options.clients, options.max_tokens)
    try:
        parity = measure(load, options.vocab_size, options.repeats, logs, errors)
    except ServerFailed as error:
        errors.print(str(error), markup=False, soft_wrap=True)
        errors.print(f"The servers' logs are in {logs}", soft_wrap=True)
        return 2
    report = {
        **made_with(),
        "vocab_size": options.vocab_size,
        **parity.to_json(),
    }
    output.print(table(report))
    for failure in report["failures"]:
        output.print(f"[bold red]FAILED[/] {failure}", soft_wrap=True)
    if options.json:
        write_report(report, options.json)
    if options.plot:
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        draw_parity(report, options.plot)
    if report["failures"]:
        errors.print(f"The servers' logs are in {logs}", soft_wrap=True)
        return 1
    shutil.rmtree(logs)
    output.print(f"[bold green]OK[/] {verdict(report)}", soft_wrap=True)
    return 0


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serve_parity",
        description="Compare vllm serve under load, stock and patched.",
    )
    for name, default, text in (
        ("repeats", 4, "servers of each kind"),
        ("prompts", 8, "prompts sent one at a time"),
        ("requests", 64, "prompts sent by all clients together"),
        ("clients", 8, "how many of these are under way at once"),
        ("max-tokens", 48, "tokens generated for each prompt"),
        ("vocab-size", 248_320, "rows of the vocabulary tables"),
    ):
        parser.add_argument(
            f"--{name}",
            type=int,
            default=default,
            metavar="N",
            help=f"{text} (default: {default})",
        )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a PNG")
    options = parser.parse_args(arguments)
    for name in ("repeats", "prompts", "requests", "clients", "max_tokens"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} has to be 1 or more")
    exit_with(lambda: run(options))


if __name__ == "__main__":
    main()
