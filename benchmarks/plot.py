# SPDX-License-Identifier: Apache-2.0
"""Draws what ``python -m benchmarks.demo --json FILE`` measured.

``python -m benchmarks.plot FILE PNG`` draws a file written earlier.
"""

import json
import sys
from pathlib import Path
from typing import Any

STOCK, PATCHED = "#c44e52", "#2a6f97"
# Seconds shown before and after the draft's loading.
BEFORE, AFTER = 3.0, 0.5
# Growth after the draft has loaded that is taken for the KV cache, in MiB.
KV_CACHE_STARTS = 16.0


def draw(report: dict[str, Any], path: Path) -> None:
    """Write a PNG of memory over time, the two runs aligned where the draft loads.

    Args:
        report: What the demo writes as JSON.
        path: File to write.

    Raises:
        OSError: If it can't be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = {"stock": report["stock"], "patched": report["patched"]}
    window = max(run["memory"]["window_s"] for run in runs.values())
    figure, axes = pyplot.subplots(figsize=(9, 4.8), dpi=150, layout="constrained")
    axes.axvspan(0, window, color="#888888", alpha=0.12, linewidth=0)
    top = max(run["memory"]["peak_mib"] for run in runs.values())
    for (name, run), color in zip(runs.items(), (STOCK, PATCHED), strict=True):
        memory = run["memory"]
        points = _shown(run["samples"], memory["window_s"])
        label = (
            f"{name}: peak {memory['peak_mib']:,.0f} MiB, that is "
            f"{memory['peak_above_before_mib']:,.0f} MiB for the draft"
        )
        style: dict[str, Any] = {"color": color, "linewidth": 2}
        axes.plot(*zip(*points, strict=True), label=label, **style)
        within = [point for point in points if 0 <= point[0] <= memory["window_s"]]
        times, levels = zip(*within, strict=True)
        axes.plot(times[-1], levels[-1], "o", color=color, markersize=6)
        axes.fill_between(
            times, levels, memory["before_mib"], color=color, alpha=0.22, linewidth=0
        )
    axes.set_xlim(-BEFORE, window + AFTER)
    axes.set_ylim(0, 1.35 * top)
    axes.set_xlabel("seconds since the draft began to load")
    axes.set_ylabel("worker's anonymous memory (MiB)")
    axes.set_title(
        "Loading a tiny Qwen3.5 + MTP in vLLM "
        f"{report['stock']['vllm']}: two tables of "
        f"{report['two_tables_mib'] / 2:,.1f} MiB each"
    )
    axes.annotate(
        "the draft loads, up to the dots",
        (window / 2, 1.04 * top),
        ha="center",
        va="bottom",
        color="#444444",
    )
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", frameon=False)
    figure.savefig(path)
    pyplot.close(figure)


def _shown(samples: list[list[float]], window: float) -> list[list[float]]:
    """Return the samples to draw: to the moment the KV cache starts to be filled.

    It would dwarf everything else.
    """
    shown: list[list[float]] = []
    settled = float("inf")
    for at, mib in samples:
        if at > window:
            settled = min(settled, mib)
            if at > window + AFTER or mib > settled + KV_CACHE_STARTS:
                break
        if at >= -BEFORE:
            shown.append([at, mib])
    return shown


def main() -> None:
    """Draw the report named first into the file named second."""
    if len(sys.argv) != 3:
        sys.exit("usage: python -m benchmarks.plot REPORT.json PLOT.png")
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
