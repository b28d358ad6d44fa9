# SPDX-License-Identifier: Apache-2.0
"""Reads an engine's log while it is written and knows when the draft loads."""

import re
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import IO

# vLLM writes the name and id of the process before each line it logs.
PROCESS = re.compile(r"^\((?P<name>\S+) pid=(?P<pid>\d+)\)")
# The legacy model runner's lines; V2 has none, see ``extension/cuda_memory.py``.
DRAFT_STARTS = "Loading drafter model..."
DRAFT_ENDS = "Sharing target model lm_head weights"
NOT_ALLOCATED = re.compile(r": ([\d.]+) MiB not allocated on this rank")
TAIL_LINES = 30


@dataclass(frozen=True)
class Marker:
    """A line that opens or closes the loading of a draft.

    Attributes:
        time: Seconds on the clock of ``time.monotonic()`` when the line was read.
        pid: The process that logged it, or None if the line does not say.
        opens: Whether it opens the loading; it closes it otherwise.
    """

    time: float
    pid: int | None
    opens: bool


def marker(line: str, at: float) -> Marker | None:
    """Return what a log line says about the draft's loading, or None."""
    if DRAFT_STARTS not in line and DRAFT_ENDS not in line:
        return None
    process = PROCESS.match(line)
    pid = int(process["pid"]) if process else None
    return Marker(at, pid, DRAFT_STARTS in line)


def not_allocated_mib(log: Path) -> list[float]:
    """Return what a log says was not allocated for the draft, in MiB per rank.

    Raises:
        OSError: If it can't be read.
    """
    text = log.read_text(encoding="utf-8", errors="replace")
    return [float(mib) for mib in NOT_ALLOCATED.findall(text)]


class LogReader:
    """Copies a process's output to a file in a thread and keeps what matters.

    Args:
        stream: The process's output; read until it ends.
        path: File to write it to; overwritten.

    Attributes:
        path: The file.
        markers: Lines about the draft's loading so far, in order.
    """

    def __init__(self, stream: IO[bytes], path: Path) -> None:
        self.path = path
        self.markers: list[Marker] = []
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._stream = stream
        self._file = path.open("w", encoding="utf-8")
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def tail(self) -> str:
        """Return the last lines of the log so far."""
        return "\n".join(self._tail.copy())

    def close(self, timeout: float = 5.0) -> None:
        """Wait for the output to end; give up after ``timeout`` seconds.

        A process that outlives its group may hold the pipe open for ever.
        """
        self._thread.join(timeout)

    def _run(self) -> None:
        with self._file, self._stream:
            for raw in self._stream:
                now = time.monotonic()
                line = raw.decode("utf-8", errors="replace").rstrip("\n")
                self._file.write(line + "\n")
                self._file.flush()
                self._tail.append(line)
                found = marker(line, now)
                if found is not None:
                    self.markers.append(found)
