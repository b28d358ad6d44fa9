# SPDX-License-Identifier: Apache-2.0
"""Asks a process of its own, which imports vLLM and loads its plugins, for something.

The process is `python -m MODULE ANSWER`: it reads a question as JSON from standard
input, and writes a JSON object to the file `ANSWER`, as `respond` does.
"""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

TIMEOUT = 600.0


def respond(
    answer: Callable[[], dict[str, Any]], explain: Callable[[Exception], str]
) -> None:
    """Be such a process: write what is answered, or `{"error": SENTENCE}`.

    Args:
        answer: Returns the answer.
        explain: Makes a sentence of what `answer` raised.

    """
    try:
        found = answer()
    except Exception as error:
        traceback.print_exc()  # for the log
        found = {"error": explain(error)}
    Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


class NoAnswer(Exception):
    """The process ended without an answer, or took too long; says what it printed."""


class Child:
    """A process that answers a question.

    Args:
        module: What it runs.
        question: For it, as JSON can hold it.
        directory: Where its files go; made.
        environment: Changes to this process's.

    """

    def __init__(
        self,
        module: str,
        question: Any,
        directory: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        directory.mkdir()
        self.file, self.log = directory / "answer", directory / "log"
        asked = directory / "question"
        asked.write_text(json.dumps(question), encoding="utf-8")
        # Each says for itself what is off, and nothing is downloaded.
        inherited = {k: v for k, v in os.environ.items() if k != "LEAN_VOCAB_WARNED"}
        with asked.open("rb") as source, self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(self.file)],
                stdin=source,
                stdout=log,
                stderr=log,
                env={**inherited, "HF_HUB_OFFLINE": "1", **(environment or {})},
            )

    def answer(self, timeout: float = TIMEOUT) -> dict[str, Any]:
        """Return what it answers.

        Args:
            timeout: How long it may take, in seconds.

        Raises:
            NoAnswer: It doesn't.

        """
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise NoAnswer(f"no answer within {timeout:.0f} s") from None
        if not self.file.exists():
            end = self.log.read_text(encoding="utf-8", errors="replace")[-3000:]
            raise NoAnswer(f"it ended:\n{end}")
        found: dict[str, Any] = json.loads(self.file.read_text(encoding="utf-8"))
        return found

    def end(self) -> None:
        """Leave nothing running."""
        self.process.kill()
        self.process.wait()
