# SPDX-License-Identifier: Apache-2.0
"""Starts ``vllm serve`` on a free local port and talks to it."""

import contextlib
import json
import re
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.process import (
    EXTENSION_CLASS,
    EngineProcess,
    Environment,
    engine_process,
)

MODEL_NAME = "counting"
COUNTER = re.compile(
    r"^vllm:spec_decode_num_(?P<name>drafts|draft_tokens|accepted_tokens)_total"
    r"(?:\{[^}]*\})? (?P<value>\S+)",
    re.MULTILINE,
)
# The server is on this machine: never by way of a proxy.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerFailed(RuntimeError):
    """The server did not start or did not answer."""


@dataclass(frozen=True)
class Completion:
    """One answer of the completions API.

    Attributes:
        text: The generated text.
        usage: Token counts as the server reports them.
    """

    text: str
    usage: dict[str, Any]


@dataclass(frozen=True)
class SpeculativeCounters:
    """The server's counters of speculative decoding since it started.

    Attributes:
        drafts: How often the draft was asked.
        draft_tokens: How many tokens it proposed.
        accepted_tokens: How many of them the target accepted.
    """

    drafts: int
    draft_tokens: int
    accepted_tokens: int


class Server:
    """A running ``vllm serve``.

    Attributes:
        process: Its process, log and memory.
    """

    def __init__(self, process: EngineProcess, port: int) -> None:
        self.process = process
        self._url = f"http://127.0.0.1:{port}"

    def wait_until_ready(
        self,
        timeout: float,
        tick: Callable[[], None] = lambda: None,
        pause: float = 0.25,
    ) -> None:
        """Wait until the server answers on ``/health``.

        Args:
            timeout: Seconds to wait at most.
            tick: Called several times a second meanwhile.
            pause: Seconds from one try to the next.

        Raises:
            ServerFailed: If it ends or takes too long.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            code = self.process.popen.poll()
            if code is not None:
                self.process.log.close()
                raise ServerFailed(f"vllm serve ended with exit code {code}")
            with contextlib.suppress(OSError), self._open("/health", timeout=2):
                return
            tick()
            time.sleep(pause)
        raise ServerFailed(f"vllm serve was not ready within {timeout:g} s")

    def complete(self, prompt: str, max_tokens: int) -> Completion:
        """Complete a prompt at temperature zero.

        Raises:
            ServerFailed: If the server doesn't answer as it should.
        """
        body = {
            "model": MODEL_NAME,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        answer = json.loads(self._read("/v1/completions", body))
        return Completion(answer["choices"][0]["text"], answer["usage"])

    def counters(self) -> SpeculativeCounters:
        """Read the counters of speculative decoding from ``/metrics``.

        Raises:
            ServerFailed: If the server doesn't answer or doesn't have them.
        """
        totals: dict[str, int] = {}
        for found in COUNTER.finditer(self._read("/metrics").decode()):
            value = int(float(found["value"]))
            totals[found["name"]] = totals.get(found["name"], 0) + value
        if len(totals) != 3:
            raise ServerFailed("/metrics has no counters of speculative decoding")
        return SpeculativeCounters(**totals)

    def settled_memory(self) -> list[list[int]]:
        """Return each worker's process id and what its memory settles at, in bytes.

        Raises:
            ServerFailed: If the server doesn't answer.
        """
        body = {"method": "settled_memory"}
        results: list[list[int]] = json.loads(self._read("/collective_rpc", body))[
            "results"
        ]
        return results

    def version(self) -> str:
        """Ask the server for vLLM's version.

        Raises:
            ServerFailed: If the server doesn't answer.
        """
        return str(json.loads(self._read("/version"))["version"])

    def _read(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        try:
            with self._open(path, body) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            raise ServerFailed(f"{path} answered {error.code}: {text}") from error
        except OSError as error:
            raise ServerFailed(f"{path} did not answer: {error}") from error

    def _open(
        self, path: str, body: dict[str, Any] | None = None, timeout: float = 120
    ) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, data, headers)
        return OPENER.open(request, timeout=timeout)


def free_port() -> int:
    """Return a port of 127.0.0.1 that nothing listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serving(
    model: Path,
    *,
    env: Environment,
    log: Path,
    num_speculative_tokens: int = 1,
    arguments: Sequence[str] = (),
) -> Iterator[Server]:
    """Run ``vllm serve`` with MTP drafts; leave nothing of it behind.

    The server is not ready yet when the block is entered.

    Args:
        model: Directory of the checkpoint.
        env: Changes to this process's environment; None removes a variable.
        log: File that the server's output goes to.
        num_speculative_tokens: Tokens per draft.
        arguments: Further arguments of ``vllm serve``.

    Raises:
        OSError: If it can't be started or the log can't be written.
    """
    port = free_port()
    speculation = {"method": "mtp", "num_speculative_tokens": num_speculative_tokens}
    command = [
        # The one beside this interpreter, whether its environment is active or not.
        str(Path(sys.executable).with_name("vllm")),
        "serve",
        str(model),
        f"--served-model-name={MODEL_NAME}",
        "--host=127.0.0.1",
        f"--port={port}",
        "--enforce-eager",
        "--no-enable-prefix-caching",
        "--max-model-len=512",
        f"--speculative-config={json.dumps(speculation)}",
        f"--worker-extension-cls={EXTENSION_CLASS}",
        *arguments,
    ]
    # Without this the server can't be asked to call the extension.
    env = {"VLLM_SERVER_DEV_MODE": "1", **env}
    with engine_process(command, env=env, log=log) as process:
        yield Server(process, port)
