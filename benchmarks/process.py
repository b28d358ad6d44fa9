# SPDX-License-Identifier: Apache-2.0
"""Starts an engine in a process group of its own and ends all of it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import psutil

from benchmarks.loading import WorkerLoading, draft_loading
from benchmarks.logs import LogReader
from benchmarks.memory import MemorySampler

# How long an engine gets to end by itself once it is asked to.
GRACE_SECONDS = 10.0

# A small KV cache, no network, no usage report.
ENGINE_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}

# How an engine is told to load the extension that measures its workers.
EXTENSION = Path(__file__).with_name("extension")
EXTENSION_CLASS = "settled_memory.SettledMemory"

Environment = Mapping[str, str | None]

# None removes the variable: patched is what an installed plugin does by itself.
SWITCHES: dict[str, Environment] = {
    "stock": {"VLLM_LEAN_VOCAB": "0"},
    "patched": {"VLLM_LEAN_VOCAB": None},
}


def environment(changes: Environment) -> dict[str, str]:
    """Return this process's environment made fit for an engine.

    Args:
        changes: Variables to set, or to remove where the value is None.
    """
    result = {**os.environ, **ENGINE_ENVIRONMENT}
    for name, value in changes.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = value
    paths = [str(EXTENSION), result.get("PYTHONPATH", "")]
    result["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return result


class EngineProcess:
    """A process in a group of its own whose log and memory are watched.

    Attributes:
        popen: The process.
        log: Its output so far.
        sampler: Its memory and that of its descendants so far.
    """

    def __init__(self, command: Sequence[str], env: Environment, log: Path) -> None:
        """Start the process.

        Args:
            command: Program and arguments.
            env: Changes to this process's environment; None removes a variable.
            log: File that its output goes to.

        Raises:
            OSError: If it can't be started or the log can't be written.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        self.popen = subprocess.Popen(
            command,
            env=environment(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            assert self.popen.stdout is not None
            self.sampler = MemorySampler(self.popen.pid)
            self.log = LogReader(self.popen.stdout, log)
            self.sampler.__enter__()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, signal.SIGKILL)
            raise

    def loading(self, settled: Sequence[Sequence[int]]) -> list[WorkerLoading]:
        """Return what each worker's memory did while its draft loaded.

        Args:
            settled: What the extension's method returned in each worker.

        Raises:
            NoLoadingWindow: If log and samples don't show it.
        """
        by_pid = {pid: rss_anon for pid, rss_anon in settled}
        return draft_loading(self.log.markers, self.sampler.series, by_pid)

    def end(self) -> None:
        """End the process and all its descendants, by force if need be."""
        self.sampler.stop()
        try:
            self._signal(signal.SIGTERM)
            deadline = time.monotonic() + GRACE_SECONDS
            while self._living() and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:
            # Also when interrupted while waiting.
            self._signal(signal.SIGKILL)
            self.popen.wait()
            self.log.close()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, number)
        # For those that have left the group.
        for process in self._living():
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)

    def _living(self) -> list[psutil.Process]:
        self.popen.poll()
        living = []
        for process in self.sampler.processes:
            with contextlib.suppress(psutil.Error):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    living.append(process)
        return living


@contextlib.contextmanager
def engine_process(
    command: Sequence[str], *, env: Environment, log: Path
) -> Iterator[EngineProcess]:
    """Run a process and leave nothing of it behind, whatever happens.

    Args:
        command: Program and arguments.
        env: Changes to this process's environment; None removes a variable.
        log: File that its output goes to.

    Raises:
        OSError: If it can't be started or the log can't be written.
    """
    process = EngineProcess(command, env, log)
    try:
        yield process
    finally:
        process.end()


@contextlib.contextmanager
def terminate_cleanly() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exception, so that clean-up code runs."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def exit_with(run: Callable[[], int]) -> NoReturn:
    """End this process with the exit code that a command returns.

    When the user interrupts it, its clean-up code runs, and the code is 130.
    """
    with terminate_cleanly():
        try:
            code = run()
        except KeyboardInterrupt:
            print("Interrupted; nothing was left running.", file=sys.stderr)
            code = 130
    sys.exit(code)
