# SPDX-License-Identifier: Apache-2.0
"""Benchmarks that no other test runs, on small models."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_head_construction(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    sizes = ["--vocab-size", "32768", "--hidden-size", "256"]
    command = [sys.executable, "-m", "benchmarks.head_construction", *sizes]
    done = subprocess.run(
        [*command, "--repeats", "1", "--json", file],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    stock, patched = report["stock"], report["patched"]
    # The head, and the norm before it.
    assert stock["head"] == "ParallelLMHead"
    assert stock["allocated_mib"]["median"] == (32_768 + 1) * 256 * 2 / 2**20
    assert patched["head"] == "DeferredLMHead"
    assert patched["allocated_mib"]["median"] == 256 * 2 / 2**20
    assert "stock    ParallelLMHead" in done.stdout
