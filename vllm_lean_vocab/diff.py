# SPDX-License-Identifier: Apache-2.0
"""Writes a pull request's change as a diff, formatted as vLLM's formatter leaves it."""

import difflib
import subprocess
import sys
from collections.abc import Mapping

# vLLM's settings are ruff's defaults, plus sorted imports, and none that is not used.
FIRST_PARTY = '--config=lint.isort.known-first-party=["vllm"]'
_TIDY_IMPORTS = ("check", "--select=I,F401", "--fix", FIRST_PARTY)


class NoFormatter(Exception):
    """Ruff is not installed, or doesn't take a file."""


def unified_diff(before: Mapping[str, str | None], after: Mapping[str, str]) -> str:
    """Return the change as `git apply` takes it.

    Args:
        before: Text of each file in vLLM, None where it has none.
        after: Text of each changed or new file.

    Raises:
        NoFormatter: Ruff is missing or fails.

    """
    parts = []
    for path, text in sorted(after.items()):
        old = before.get(path)
        lines = difflib.unified_diff(
            [] if old is None else old.splitlines(keepends=True),
            formatted(path, text).splitlines(keepends=True),
            "/dev/null" if old is None else f"a/{path}",
            f"b/{path}",
        )
        mode = "new file mode 100644\n" if old is None else ""
        parts.append(f"diff --git a/{path} b/{path}\n{mode}{''.join(lines)}")
    return "".join(parts)


def coloured(text: str) -> str:
    """Return a diff with colours for a terminal; as it is if Pygments is missing."""
    try:
        from pygments import highlight
        from pygments.formatters import TerminalFormatter
        from pygments.lexers import DiffLexer
    except ImportError:
        return text
    lexer = DiffLexer(stripnl=False, ensurenl=False)
    return str(highlight(text, lexer, TerminalFormatter()))


def formatted(path: str, text: str) -> str:
    """Return a file's text as ruff leaves it.

    Raises:
        NoFormatter: Ruff is missing or fails.

    """
    for command in (_TIDY_IMPORTS, ("format",)):
        text = _ruff(*command, "--isolated", "--stdin-filename", path, "-", text=text)
    return text


def _ruff(*arguments: str, text: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "--quiet", *arguments],
        input=text,
        capture_output=True,
        text=True,
    )
    if "No module named ruff" in done.stderr:
        raise NoFormatter(
            "ruff is needed to format a diff as vLLM does: "
            "pip install 'vllm-lean-vocab[diff]'"
        )
    if done.returncode != 0:
        raise NoFormatter(f"ruff failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
