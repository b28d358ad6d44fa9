# SPDX-License-Identifier: Apache-2.0
"""The README's figures are those of the committed results."""

import subprocess
import sys
from pathlib import Path


def test_readme_shows_the_results() -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "benchmarks.readme", "--check"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
