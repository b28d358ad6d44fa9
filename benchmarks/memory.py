# SPDX-License-Identifier: Apache-2.0
"""Samples the anonymous memory of all processes below one process.

Anonymous resident memory (``RssAnon``) is what a process filled itself. It leaves
out the pages of memory-mapped checkpoint files, which come and go as the kernel
likes. Memory that was allocated but never written to does not count.
"""

import threading
import time
from dataclasses import dataclass
from types import TracebackType

import psutil

MIB = 2**20


@dataclass(frozen=True)
class Sample:
    """One reading of one process.

    Attributes:
        time: Seconds on the clock of ``time.monotonic()``.
        rss_anon: Anonymous resident memory in bytes.
    """

    time: float
    rss_anon: int


Series = list[Sample]


def rss_anon(pid: int) -> int:
    """Return the anonymous resident memory of a process in bytes.

    Raises:
        ProcessLookupError: If the process has ended or is about to.
    """
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as status:
            for line in status:
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) * 1024
    except FileNotFoundError:
        pass
    raise ProcessLookupError(pid)


class MemorySampler:
    """Samples a process and all its descendants in a thread, as a context manager.

    Args:
        pid: The topmost process.
        interval: Seconds from one round of readings to the next.
        refresh: Seconds from one look for new processes to the next. This costs
            far more than a reading, and engine processes import for seconds
            before they load anything.

    Attributes:
        series: The readings of every process seen, by process id.
    """

    def __init__(self, pid: int, interval: float = 0.02, refresh: float = 0.25) -> None:
        self.series: dict[int, Series] = {}
        self._root = psutil.Process(pid)
        self._interval = interval
        self._refresh = refresh
        self._processes: set[psutil.Process] = {self._root}
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="memory sampler", daemon=True
        )

    def __enter__(self) -> "MemorySampler":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End sampling and wait for the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def processes(self) -> list[psutil.Process]:
        """Every process seen so far; one that has ended says so when asked."""
        return list(self._processes)

    def _run(self) -> None:
        refresh_at = 0.0
        living: set[int] = set()
        while not self._stop.is_set():
            now = time.monotonic()
            if now >= refresh_at:
                living = self._find()
                refresh_at = now + self._refresh
            for pid in list(living):
                try:
                    sample = Sample(time.monotonic(), rss_anon(pid))
                except OSError:
                    living.discard(pid)
                    continue
                self.series.setdefault(pid, []).append(sample)
            self._stop.wait(max(0.0, now + self._interval - time.monotonic()))

    def _find(self) -> set[int]:
        """Look for new processes; return the ids of the living ones."""
        try:
            found = {self._root, *self._root.children(recursive=True)}
        except psutil.Error:
            found = set()
        # A process whose parent has ended is no longer found below the root.
        self._processes = self._processes | found
        return {process.pid for process in self._processes if process.is_running()}
