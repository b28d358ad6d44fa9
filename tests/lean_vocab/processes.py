# SPDX-License-Identifier: Apache-2.0
"""Runs functions of the tests in processes that have not loaded vLLM's plugins yet.

vLLM takes long to import. So one process imports what vLLM has imported before it loads
its plugins, and is forked for each call.
"""

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

# Of what these bring in, the series edits bodies of functions only.
IMPORTED_BEFORE = (
    "pytest",
    "vllm.logger",
    "vllm.plugins",
    "vllm.engine.arg_utils",
    "vllm.model_executor.models.registry",
    "vllm.model_executor.models.qwen3_next",
)
SWITCHES = ("VLLM_LEAN_VOCAB", "VLLM_PLUGINS", "LEAN_VOCAB_WARNED")


@dataclass(frozen=True)
class Outcome:
    """What became of a call: what it returned, and what it wrote."""

    value: Any
    output: str

    def lines(self, text: str) -> list[str]:
        """Return the lines of output that hold a text."""
        return [line for line in self.output.splitlines() if text in line]


class Processes:
    """Calls functions in processes of their own.

    Args:
        folder: Where output and results are kept.

    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = 0
        self.server: subprocess.Popen[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any, **environ: str) -> Outcome:
        """Call a module-level function in a process with vLLM imported, but no plugin.

        Args:
            function: What to call; it is found by name in its file.
            args: Its arguments, as JSON can hold them.
            environ: Additional environment variables.

        """
        if self.server is None:
            self.server = self._start()
        return self._call(self.server, function, args, environ)

    def __enter__(self) -> "Processes":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.server is not None:
            _end(self.server)

    def _start(self) -> "subprocess.Popen[str]":
        environ = {k: v for k, v in os.environ.items() if k not in SWITCHES}
        return subprocess.Popen(
            # -P: the folder of this file is no place to import from.
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
            start_new_session=True,
        )

    def _call(
        self,
        process: "subprocess.Popen[str]",
        function: Callable[..., Any],
        args: tuple[Any, ...],
        environ: dict[str, str],
    ) -> Outcome:
        self.calls += 1
        output, result = (
            self.folder / f"{self.calls}.{kind}" for kind in ("log", "json")
        )
        request = {
            "file": function.__code__.co_filename,
            "function": function.__name__,
            "args": args,
            "environ": environ,
            "output": str(output),
            "result": str(result),
        }
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], 120)
        if not ready:
            _end(process)
            raise TimeoutError(f"{function.__name__}: {output.read_text()}")
        process.stdout.readline()
        text = output.read_text(errors="replace")
        if not result.exists():
            raise AssertionError(f"{function.__name__} failed:\n{text}")
        return Outcome(json.loads(result.read_text()), text)


def run_script(
    script: Path, jobs: Sequence[Mapping[str, Any]], switch: str, folder: Path
) -> list[dict[str, Any]]:
    """Run a script that does jobs, such as `load_draft_classes.py`.

    Args:
        script: The script.
        jobs: What it does.
        switch: Value of `VLLM_LEAN_VOCAB`.
        folder: Where the jobs and a cache are kept.

    Returns:
        Its report of each job.

    """
    file = folder / f"jobs-{uuid.uuid4().hex}.json"
    file.write_text(json.dumps(jobs))
    env = {
        **os.environ,
        "VLLM_LEAN_VOCAB": switch,
        "VLLM_CACHE_ROOT": str(folder / f"cache-{switch}"),
        "VLLM_DIST_IDENT": uuid.uuid4().hex,
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-P", str(script), str(file)]
    process = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=900
    )
    assert process.returncode == 0, process.stderr[-3000:]
    reports: list[dict[str, Any]] = json.loads(process.stdout.splitlines()[-1])
    return reports


def _end(process: "subprocess.Popen[str]") -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _serve() -> None:
    # Whatever is printed while importing is not an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in IMPORTED_BEFORE:
        importlib.import_module(name)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _carry_out(json.loads(line))
            os._exit(0)
        os.waitpid(child, 0)
        print("done", file=answers, flush=True)


def _carry_out(request: dict[str, Any]) -> None:
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(request["environ"])
    try:
        # As part of a package: relative imports work.
        folder, _, name = request["file"].removesuffix(".py").rpartition(os.sep)
        package = ModuleType("lean_vocab_tests")
        package.__path__ = [folder]
        sys.modules[package.__name__] = package
        module = importlib.import_module(f"{package.__name__}.{name}")
        value = getattr(module, request["function"])(*request["args"])
        Path(request["result"]).write_text(json.dumps(value))
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()


if __name__ == "__main__":
    _serve()
