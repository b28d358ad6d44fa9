# SPDX-License-Identifier: Apache-2.0
"""Stock against patched: what was measured, and whether the promises hold."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.engine import EngineRun
from benchmarks.loading import WorkerLoading
from benchmarks.memory import MIB
from benchmarks.server import Completion, SpeculativeCounters

# The peak has to fall by this part of what the tables take.
LEAST_PART_SAVED = 0.98
# What remains after loading may differ by this part.
MOST_PART_CHANGED = 0.01
# What the log says is rounded, in MiB.
LOG_PRECISION = 0.1
# Readings kept for the record: this many seconds around the draft's loading, at
# most this many.
SECONDS_KEPT = (8.0, 4.0)
MOST_SAMPLES = 1_500
# The counters of speculative decoding.
COUNTERS = {
    "drafts": "The number of drafts",
    "draft_tokens": "The number of draft tokens",
    "accepted_tokens": "The number of accepted draft tokens",
}


@dataclass(frozen=True)
class Serving:
    """What one server did.

    Attributes:
        vllm: Its version as it reports it.
        completions: Its answers, in the order of the prompts.
        counters: Its counters of speculative decoding after the last answer.
        worker: The memory of the worker while the draft loaded.
        seconds_to_ready: From start to the first answer on ``/health``.
    """

    vllm: str
    completions: list[Completion]
    counters: SpeculativeCounters
    worker: WorkerLoading
    seconds_to_ready: float

    def texts(self) -> list[list[str]]:
        """Return the words of every answer."""
        return [completion.text.split() for completion in self.completions]

    def usage(self) -> dict[str, int]:
        """Return the token counts summed over all answers."""
        names = ("prompt_tokens", "completion_tokens", "total_tokens")
        return {
            name: sum(completion.usage[name] for completion in self.completions)
            for name in names
        }

    def to_json(self) -> dict[str, Any]:
        """Return figures and samples, ready for ``json.dump``.

        A sample is [seconds since the draft began to load, MiB].
        """
        start = self.worker.start
        earliest, latest = SECONDS_KEPT
        kept = [
            [round(sample.time - start, 3), round(sample.rss_anon / MIB, 2)]
            for sample in self.worker.series
            if start - earliest <= sample.time <= self.worker.end + latest
        ]
        return {
            "vllm": self.vllm,
            "seconds_to_ready": round(self.seconds_to_ready, 1),
            "memory": self.worker.figures(),
            "usage": self.usage(),
            "usage_per_prompt": [c.usage for c in self.completions],
            "texts": [completion.text for completion in self.completions],
            **asdict(self.counters),
            "samples": kept[:: 1 + len(kept) // MOST_SAMPLES],
        }


@dataclass(frozen=True)
class Comparison:
    """Two servers that were asked the same.

    Attributes:
        stock: vLLM as it is.
        patched: vLLM with this project's changes.
        expected: The words of the known answers, per prompt.
        table_bytes: Bytes of one vocabulary table.
    """

    stock: Serving
    patched: Serving
    expected: list[list[str]]
    table_bytes: int

    @property
    def saved(self) -> int:
        """How far the loading peak fell, in bytes.

        Counted above the level before the draft and in absolute terms; the smaller
        of the two, so that moving the memory elsewhere is no saving.
        """
        stock, patched = self.stock.worker, self.patched.worker
        return min(stock.peak_above - patched.peak_above, stock.peak - patched.peak)

    def failures(self) -> list[str]:
        """Return every promise that does not hold, as a sentence each."""
        stock, patched = self.stock, self.patched
        failures = []
        for name, run in (("stock", stock), ("patched", patched)):
            if run.texts() != self.expected:
                failures.append(f"The {name} text is not the known continuation.")
        for what, one, other in (
            ("Text", stock.texts(), patched.texts()),
            ("Token usage", _usages(stock), _usages(patched)),
            *(
                (what, getattr(stock.counters, name), getattr(patched.counters, name))
                for name, what in COUNTERS.items()
            ),
        ):
            if one != other:
                failures.append(f"{what} differs: stock {one}, patched {other}.")
        tables = 2 * self.table_bytes / MIB
        failures += fall_failures("The loading peak", self.saved / MIB, tables)
        failures += after_failures(stock.worker.after / MIB, patched.worker.after / MIB)
        return failures

    def to_json(self) -> dict[str, Any]:
        """Return figures, verdict and samples, ready for ``json.dump``."""
        return {
            "two_tables_mib": round(2 * self.table_bytes / MIB, 2),
            "peak_lower_by_mib": round(self.saved / MIB, 2),
            "failures": self.failures(),
            "stock": self.stock.to_json(),
            "patched": self.patched.to_json(),
        }

    def rows(self) -> Sequence[tuple[str, str, str, str]]:
        """Return a table's rows: what, stock, patched, the difference or verdict."""
        stock, patched = self.stock, self.patched
        same = "identical" if stock.texts() == patched.texts() else "DIFFERENT"
        return [
            _memory_row(
                "Peak while the draft loads, above the level before",
                stock.worker.peak_above,
                patched.worker.peak_above,
            ),
            _memory_row(
                "Peak while the draft loads", stock.worker.peak, patched.worker.peak
            ),
            _memory_row("Before the draft", stock.worker.before, patched.worker.before),
            _memory_row(
                "Ready to serve, KV cache included",
                stock.worker.after,
                patched.worker.after,
            ),
            ("Text", self._verdict(stock), self._verdict(patched), same),
            _count_row("Token usage: prompt", *self._tokens("prompt_tokens")),
            _count_row("Token usage: completion", *self._tokens("completion_tokens")),
            _count_row("Drafts", stock.counters.drafts, patched.counters.drafts),
            _count_row(
                "Accepted draft tokens",
                stock.counters.accepted_tokens,
                patched.counters.accepted_tokens,
            ),
        ]

    def _verdict(self, run: Serving) -> str:
        right = sum(a == b for a, b in zip(run.texts(), self.expected, strict=True))
        return f"{right} of {len(self.expected)} right"

    def _tokens(self, name: str) -> tuple[int, int]:
        return self.stock.usage()[name], self.patched.usage()[name]


def output_failures(
    runs: Mapping[str, Sequence[EngineRun]],
    expected: Mapping[str, Sequence[Sequence[int]]],
) -> list[str]:
    """Return every promise about tokens and counters that does not hold.

    Args:
        runs: The engines' results, stock and patched.
        expected: The token ids of the known answers of each, per prompt.
    """
    failures = []
    for name, results in runs.items():
        if any(run.token_ids != expected[name] for run in results):
            failures.append(f"The {name} tokens are not the known continuation.")
    return failures + counter_failures(runs)


def counter_failures(
    runs: Mapping[str, Sequence[EngineRun | SpeculativeCounters]],
) -> list[str]:
    """Say which counters of speculative decoding are not the same in all runs.

    Args:
        runs: What has the counters, stock and patched.
    """
    failures = []
    for counter, what in COUNTERS.items():
        values = {
            name: [getattr(run, counter) for run in results]
            for name, results in runs.items()
        }
        if len({*values["stock"], *values["patched"]}) != 1:
            failures.append(
                f"{what} differs: stock {values['stock']}, patched {values['patched']}."
            )
    return failures


def log_failures(logged: Sequence[float], tables: float, ranks: int = 1) -> list[str]:
    """Say which patched logs don't say that the draft's tables were left out.

    Args:
        logged: What each says was not allocated, in MiB, summed over its ranks.
        tables: What the tables take, in MiB.
        ranks: Number of ranks.
    """
    return [
        f"A log says that {mib:,.1f} MiB were not allocated; the tables take "
        f"{tables:,.1f} MiB."
        for mib in logged
        if abs(mib - tables) > LOG_PRECISION * ranks
    ]


def fall_failures(what: str, fell_by: float, promised: float) -> list[str]:
    """Say whether memory fell by less than promised.

    Args:
        what: The level that fell.
        fell_by: By how much, in MiB.
        promised: What is no longer there, in MiB.
    """
    if fell_by >= LEAST_PART_SAVED * promised:
        return []
    sentence = (
        f"{what} fell by {fell_by:,.1f} MiB; at least {LEAST_PART_SAVED:.0%} of the "
        f"tables' {promised:,.1f} MiB was promised."
    )
    return [sentence]


def after_failures(stock: float, patched: float) -> list[str]:
    """Say whether what remains after loading, in MiB, is not about the same."""
    if abs(patched - stock) <= MOST_PART_CHANGED * stock:
        return []
    sentence = (
        f"Memory after loading differs by more than {MOST_PART_CHANGED:.0%}: "
        f"stock {stock:,.1f} MiB, patched {patched:,.1f} MiB."
    )
    return [sentence]


def _usages(run: Serving) -> list[dict[str, Any]]:
    return [completion.usage for completion in run.completions]


def _memory_row(label: str, stock: int, patched: int) -> tuple[str, str, str, str]:
    difference = f"{(patched - stock) / MIB:+,.1f} MiB"
    return label, f"{stock / MIB:,.1f} MiB", f"{patched / MIB:,.1f} MiB", difference


def _count_row(label: str, stock: int, patched: int) -> tuple[str, str, str, str]:
    same = "identical" if stock == patched else "DIFFERENT"
    return label, f"{stock:,}", f"{patched:,}", same
