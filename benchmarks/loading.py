# SPDX-License-Identifier: Apache-2.0
"""What the memory of the workers does while a draft loads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.logs import DRAFT_ENDS, DRAFT_STARTS, Marker
from benchmarks.memory import MIB, Series


class NoLoadingWindow(RuntimeError):
    """The log does not show when the draft was loaded."""


@dataclass(frozen=True)
class WorkerLoading:
    """The memory of one worker around the loading of its draft.

    Attributes:
        pid: The worker's process id.
        logged_start: Whether this worker logged the start itself. Only the first
            of several does; the others' ``start`` is the first's, so that their
            ``before`` may be off by what they were ahead.
        start: When loading began, in seconds of ``time.monotonic()``.
        end: When the LM head was shared, on the same clock.
        before: Anonymous memory just before, in bytes.
        peak: The most in between, in bytes.
        after: What remained once the engine was ready and Python had collected its
            garbage, in bytes; this includes the KV cache.
        series: All readings of this worker.
    """

    pid: int
    logged_start: bool
    start: float
    end: float
    before: int
    peak: int
    after: int
    series: Series

    @property
    def peak_above(self) -> int:
        """How far the peak stands above the level before, in bytes."""
        return self.peak - self.before

    def figures(self) -> dict[str, Any]:
        """Return the levels in MiB and the duration in seconds, for a report."""
        return {
            "before_mib": round(self.before / MIB, 2),
            "peak_mib": round(self.peak / MIB, 2),
            "peak_above_before_mib": round(self.peak_above / MIB, 2),
            "after_mib": round(self.after / MIB, 2),
            "window_s": round(self.end - self.start, 3),
        }


def draft_loading(
    markers: Sequence[Marker],
    series: Mapping[int, Series],
    settled: Mapping[int, int],
) -> list[WorkerLoading]:
    """Return what each worker's memory did while its draft loaded.

    Args:
        markers: What the log said about the draft, in order.
        series: The readings of every process, by process id.
        settled: What each worker said remained in the end, by process id, in bytes.

    Returns:
        One entry per process that logged that it shares the LM head, by process id;
        none for one that was done when the first began, or too far ahead of it to be
        measured.

    Raises:
        NoLoadingWindow: If a line is missing from the log, if it does not say which
            process wrote it, or if that process was not sampled around it or did
            not say what remained.
    """
    opened = [m for m in markers if m.opens]
    closed = {m.pid: m for m in markers if not m.opens}
    if not opened or not closed:
        missing = DRAFT_STARTS if not opened else DRAFT_ENDS
        raise NoLoadingWindow(
            f'the log has no line "{missing}", so when the draft was loaded is unknown'
        )
    workers = []
    for pid, closing in sorted(closed.items(), key=lambda item: item[0] or 0):
        if pid is None:
            raise NoLoadingWindow("the log does not say which process loaded the draft")
        # Only the first worker of a machine logs the opening line.
        own = [m for m in opened if m.pid == pid]
        if pid not in settled:
            raise NoLoadingWindow(f"process {pid} did not say what remained")
        start, end = (own or opened)[0].time, closing.time
        readings = series.get(pid, [])
        try:
            before, peak = _levels(pid, start, end, readings)
        except NoLoadingWindow:
            if own:
                raise
            continue
        workers.append(
            WorkerLoading(
                pid=pid,
                logged_start=bool(own),
                start=start,
                end=end,
                before=before,
                peak=peak,
                after=settled[pid],
                series=list(readings),
            )
        )
    return workers


def _levels(pid: int, start: float, end: float, series: Series) -> tuple[int, int]:
    """Return the last level before a window and the highest in it, in bytes.

    Raises:
        NoLoadingWindow: If there is no reading before it or none in it.
    """
    earlier = [s.rss_anon for s in series if s.time <= start]
    within = [s.rss_anon for s in series if start <= s.time <= end]
    if not earlier or not within:
        raise NoLoadingWindow(
            f"process {pid} was not sampled around the {end - start:.3f} s in which "
            "its draft loaded"
        )
    return earlier[-1], max(within)


def largest(workers: Sequence[WorkerLoading]) -> WorkerLoading:
    """Return the worker whose memory grew most.

    Raises:
        ValueError: If there is none.
    """
    return max(workers, key=lambda worker: worker.peak_above)
