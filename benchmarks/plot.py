# SPDX-License-Identifier: Apache-2.0
"""Draws what ``benchmarks.demo`` and ``benchmarks.load_peak`` measured.

``python -m benchmarks.plot FILE PNG`` draws a file that one of them wrote with
``--json`` earlier.
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


def draw_peaks(report: dict[str, Any], path: Path) -> None:
    """Write a PNG of what loading took in each case, stock and patched.

    Args:
        report: What ``benchmarks.load_peak`` writes as JSON.
        path: File to write.

    Raises:
        OSError: If it can't be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = report["cases"].values()
    height = 0.32
    size = (9, 1.5 + 0.85 * len(cases))
    figure, axes = pyplot.subplots(figsize=size, dpi=150, layout="constrained")
    top = 0.0
    for name, color, offset in (
        ("stock", STOCK, -height / 2),
        ("patched", PATCHED, height / 2),
    ):
        peaks = [case[name]["peak_above_before_mib"] for case in cases]
        places = [place + offset for place in range(len(cases))]
        medians = [peak["median"] for peak in peaks]
        axes.barh(places, medians, height, color=color, label=name)
        top = max(top, *medians)
        for place, median, case in zip(places, medians, cases, strict=True):
            label = f"{median:,.1f}"
            if name == "patched":
                label += f"; the draft owns {case['draft_owns_mib']:,.1f}"
            axes.annotate(
                label,
                (median, place),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                color=color,
            )
    axes.plot(
        [case["draft_owns_mib"] for case in cases],
        [place + height + 0.08 for place in range(len(cases))],
        "^",
        color="black",
        markersize=5,
        clip_on=False,
        label="what the draft owns, the least that loading takes",
    )
    axes.set_yticks(
        range(len(cases)),
        [f"{case['description']}\n{_tables(case)}" for case in cases],
    )
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1 * top)
    axes.set_xlabel("a worker's peak memory above the level before the draft (MiB)")
    axes.set_title(f"Loading an MTP draft in vLLM {report['vllm']}")
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path)
    pyplot.close(figure)


def _tables(case: dict[str, Any]) -> str:
    each = f"{case['tables']} tables of {case['table_mib']:,.1f} MiB"
    return f"{each} per rank" if case["ranks"] > 1 else each


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
    report = json.loads(Path(sys.argv[1]).read_text())
    (draw_peaks if "cases" in report else draw)(report, Path(sys.argv[2]))


if __name__ == "__main__":
    main()
