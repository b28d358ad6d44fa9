# SPDX-License-Identifier: Apache-2.0
"""What the reports of measurements have in common."""

import json
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.machine import machine, versions, vllm_version


def made_with() -> dict[str, Any]:
    """Return what every report begins with: when and with what it is made.

    Raises:
        importlib.metadata.PackageNotFoundError: No vLLM is installed.
    """
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "vllm": vllm_version(),
        "versions": versions(),
        "machine": machine(),
    }


def spread(samples: Sequence[float]) -> dict[str, Any]:
    """Return the median of samples, the least and the most of them, and all."""
    return {
        # The mean of two that are rounded is rounded, too.
        "median": round(statistics.median(samples), 9),
        "min": min(samples),
        "max": max(samples),
        "samples": list(samples),
    }


def write_report(report: dict[str, Any], file: Path) -> None:
    """Write a report as JSON.

    Args:
        report: What was measured.
        file: File to write; its directory is made if missing.

    Raises:
        OSError: If it can't be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=1) + "\n")
