# SPDX-License-Identifier: Apache-2.0
"""Nothing of an engine is left running, however its user is ended."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]

# Stands for an engine: a process that ignores SIGTERM, with a child in a group of its
# own that does too.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
subprocess.Popen([sys.executable, "-c", child + "time.sleep(600)"],
                 start_new_session=True)
print("started", flush=True)
time.sleep(600)
"""

USER = """
import signal, sys, time
from pathlib import Path
from benchmarks import process
signal.signal(signal.SIGINT, signal.default_int_handler)  # not so in the background
process.GRACE_SECONDS = 0.5
log = Path(sys.argv[1])
with process.terminate_cleanly():
    command = [sys.executable, "-c", sys.argv[2]]
    with process.engine_process(command, env={}, log=log):
        while "started" not in log.read_text():
            time.sleep(0.05)
        time.sleep(0.5)
        print("ready", flush=True)
        time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", USER, str(tmp_path / "log"), STUBBORN]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as user:
        assert user.stdout is not None
        assert user.stdout.readline() == "ready\n"
        descendants = psutil.Process(user.pid).children(recursive=True)
        assert len(descendants) == 2
        user.send_signal(number)
        try:
            assert user.wait(30) != 0
        finally:
            user.kill()
    deadline = time.monotonic() + 5
    while any(p.is_running() for p in descendants) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [p for p in descendants if p.is_running() and p.status() != "zombie"]
