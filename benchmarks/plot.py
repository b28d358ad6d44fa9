# SPDX-License-Identifier: Apache-2.0
"""Draws the reports of the measurements.

``python -m benchmarks.plot FILE PNG`` draws a file that one of them wrote with
``--json`` earlier.
"""

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

STOCK, PATCHED = "#c44e52", "#2a6f97"
# Seconds shown before and after the draft's loading.
BEFORE, AFTER = 3.0, 0.5
# Growth after the draft has loaded that is taken for the KV cache, in MiB.
KV_CACHE_STARTS = 16.0


@contextlib.contextmanager
def drawing(
    path: Path, width: float, height: float, columns: int = 1, **options: Any
) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Yield a figure and its axes; write them as a PNG when the block ends well.

    Args:
        path: File to write.
        width: In inches.
        height: In inches.
        columns: Number of axes, side by side.
        **options: Further arguments of ``pyplot.subplots``.

    Raises:
        OSError: If it can't be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(
        ncols=columns,
        squeeze=False,
        figsize=(width, height),
        dpi=150,
        layout="constrained",
        **options,
    )
    try:
        for axes in grid[0]:
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_axisbelow(True)
        yield figure, list(grid[0])
        figure.savefig(path)
    finally:
        pyplot.close(figure)


def draw(report: dict[str, Any], path: Path) -> None:
    """Write a PNG of memory over time, the two runs aligned where the draft loads.

    Args:
        report: What the demo writes as JSON.
        path: File to write.

    Raises:
        OSError: If it can't be written.
    """
    runs = {"stock": report["stock"], "patched": report["patched"]}
    window = max(run["memory"]["window_s"] for run in runs.values())
    top = max(run["memory"]["peak_mib"] for run in runs.values())
    with drawing(path, 9, 4.8) as (_, [axes]):
        axes.axvspan(0, window, color="#888888", alpha=0.12, linewidth=0)
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
            before = memory["before_mib"]
            axes.fill_between(
                times, levels, before, color=color, alpha=0.22, linewidth=0
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
        axes.legend(loc="upper left", frameon=False)


def draw_peaks(report: dict[str, Any], path: Path) -> None:
    """Write a PNG of what loading took in each case, and of the limit that it has.

    Stock and patched stand side by side; patched once more on a scale of its own,
    against the tensors that the draft owns.

    Args:
        report: What ``benchmarks.load_peak`` writes as JSON.
        path: File to write.

    Raises:
        OSError: If it can't be written.
    """
    cases = list(report["cases"].values())
    places = range(len(cases))
    owned = [case["draft_owns_mib"] for case in cases]
    peaks = {
        name: [case[name]["peak_above_before_mib"]["median"] for case in cases]
        for name in ("stock", "patched")
    }
    size = 11, 2.0 + 0.62 * len(cases)
    options: dict[str, Any] = {"sharey": True, "width_ratios": [3, 2]}
    with drawing(path, *size, columns=2, **options) as (figure, [both, close]):
        height = 0.38
        for name, color, offset in (
            ("stock", STOCK, -height / 2),
            ("patched", PATCHED, height / 2),
        ):
            beside = [place + offset for place in places]
            bars = both.barh(beside, peaks[name], height, color=color, label=name)
            both.bar_label(bars, fmt="{:,.1f}", padding=4, color=color)
        close.barh(places, peaks["patched"], 2 * height, color=PATCHED)
        ends = [max(pair) for pair in zip(peaks["patched"], owned, strict=True)]
        for place, end, peak, limit in zip(
            places, ends, peaks["patched"], owned, strict=True
        ):
            label = f"{peak:,.1f}, limit {limit:,.1f}"
            close.annotate(
                label, (end, place), (6, 0), textcoords="offset points", va="center"
            )
        close.vlines(
            owned,
            [place - 0.46 for place in places],
            [place + 0.46 for place in places],
            color="black",
            linewidth=2,
            label="limit: the tensors that the draft owns",
        )
        both.set_yticks(
            places, [f"{case['description']}\n{_tables(case)}" for case in cases]
        )
        both.set_ylim(len(cases) - 0.4, -0.6)
        both.set_xlim(0, 1.14 * max(peaks["stock"] + peaks["patched"]))
        close.set_xlim(0, 1.6 * max(ends))
        close.tick_params(axis="y", length=0)
        for axes, title in (
            (both, "stock and patched"),
            (close, "patched, against the limit"),
        ):
            axes.set_title(title)
            axes.set_xlabel("peak above the level before (MiB)")
            axes.grid(axis="x", alpha=0.25)
        figure.suptitle(
            f"A worker's memory while its draft loads, vLLM {report['vllm']}"
        )
        figure.legend(loc="outside lower center", ncols=3, frameon=False)


def draw_heads(report: dict[str, Any], path: Path) -> None:
    """Write a PNG of what building an LM head allocates, stock and patched.

    Args:
        report: What ``benchmarks.head_construction`` writes as JSON.
        path: File to write.

    Raises:
        OSError: If it can't be written.
    """
    runs = {name: report[name] for name in ("stock", "patched")}
    kinds = [key for key in runs["stock"] if key.endswith("_mib")]
    labels = [
        f"{name}: {run['head']}\n{kind.removesuffix('_mib')}"
        for kind in kinds
        for name, run in runs.items()
    ]
    medians = [run[kind]["median"] for kind in kinds for run in runs.values()]
    colors = [STOCK, PATCHED] * len(kinds)
    with drawing(path, 9, 1.3 + 0.7 * len(labels)) as (_, [axes]):
        bars = axes.barh(labels, medians, 0.6, color=colors)
        axes.bar_label(bars, fmt="{:,.3f} MiB", padding=4)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.2 * max(medians))
        axes.set_xlabel("peak above the level before (MiB)")
        axes.set_title(
            f"Building the head of a GLM MTP layer in vLLM {report['vllm']}: "
            f"{report['vocab_size']:,} x {report['hidden_size']:,}, {report['dtype']}"
        )
        axes.grid(axis="x", alpha=0.25)


def draw_start_cost(report: dict[str, Any], path: Path) -> None:
    """Write a PNG of what the plugin adds to the start of processes and servers.

    Every process is a dot, the median a bar, and what was promised a dashed line.

    Args:
        report: What ``benchmarks.start_cost`` writes as JSON.
        path: File to write.

    Raises:
        OSError: If it can't be written.
    """
    promised = report["promised_ms"]
    ready = report.get("serve_ready")
    columns = 3 if ready else 2
    with drawing(path, 3.4 * columns, 4.2, columns=columns) as (figure, all_axes):
        together = f"{len(report['cold_together_ms']['samples'])} together"
        for axes, title, names in (
            (all_axes[0], "warm cache", {"warm": "one process"}),
            (
                all_axes[1],
                "empty cache",
                {"cold": "one process", "cold_together": together},
            ),
        ):
            figures = {label: report[f"{name}_ms"] for name, label in names.items()}
            _dots(axes, figures, [PATCHED] * len(figures))
            limit = max(promised[name] for name in names)
            axes.axhline(limit, color="black", linestyle="--", linewidth=1)
            axes.set_ylim(0, 1.15 * max(limit, *(f["max"] for f in figures.values())))
            axes.set_ylabel("the plugin's part of the start (ms)")
            axes.set_title(
                f"{title}: at most {limit:,.0f} ms promised", fontsize="medium"
            )
        if ready:
            axes = all_axes[2]
            figures = {name: ready[f"{name}_s"] for name in ("stock", "patched")}
            _dots(axes, figures, [STOCK, PATCHED])
            axes.set_ylim(0, 1.15 * max(f["max"] for f in figures.values()))
            axes.set_ylabel("vllm serve, until it is ready (s)")
            axes.set_title(
                f"{ready['difference_s']:+.2f} s; stock varies by "
                f"{ready['spread_of_stock_s']:.2f} s",
                fontsize="medium",
            )
        figure.suptitle(f"What the plugin adds to the start of vLLM {report['vllm']}")


def _dots(
    axes: Any, figures: Mapping[str, Mapping[str, Any]], colors: Sequence[str]
) -> None:
    """Draw samples as dots on bars of their medians."""
    medians = [each["median"] for each in figures.values()]
    axes.bar(list(figures), medians, 0.55, color=colors, alpha=0.35)
    for place, (each, color) in enumerate(zip(figures.values(), colors, strict=True)):
        samples = each["samples"]
        # Side by side, in the order they were measured in.
        step = 0.4 / len(samples)
        across = [
            place + step * (n - (len(samples) - 1) / 2) for n in range(len(samples))
        ]
        axes.plot(across, samples, "o", color=color, markersize=4)
    axes.set_xlim(-0.8, len(medians) - 0.2)
    axes.grid(axis="y", alpha=0.25)


def draw_load_times(report: dict[str, Any], path: Path) -> None:
    """Write a PNG of the seconds and bytes that loading a draft took.

    Args:
        report: What ``benchmarks.draft_load_time`` writes as JSON.
        path: File to write.

    Raises:
        OSError: If it can't be written.
    """
    rows = [
        (f"{case['description']}\n{cache} page cache", case[cache])
        for case in report["cases"].values()
        for cache in report["caches"]
    ]
    height = 0.36
    size = 10, 1.5 + 0.85 * len(rows)
    with drawing(path, *size, columns=2, sharey=True) as (figure, both):
        for axes, what, label in (
            (both[0], "loading_s", "seconds, without Python's garbage collections"),
            (both[1], "read_mib", "MiB read from disk"),
        ):
            top = 0.0
            for name, color, offset in (
                ("stock", STOCK, -height / 2),
                ("patched", PATCHED, height / 2),
            ):
                values = [figures[name][what] for _, figures in rows]
                places = [place + offset for place in range(len(rows))]
                medians = [value["median"] for value in values]
                errors = [
                    [value["median"] - value["min"] for value in values],
                    [value["max"] - value["median"] for value in values],
                ]
                axes.barh(places, medians, height, color=color, label=name)
                axes.errorbar(
                    medians,
                    places,
                    xerr=errors,
                    fmt="none",
                    color="black",
                    elinewidth=1,
                )
                top = max(top, *(value["max"] for value in values))
                for place, value in zip(places, values, strict=True):
                    digits = 2 if what == "loading_s" else 1
                    axes.annotate(
                        f"{value['median']:,.{digits}f}",
                        (value["max"], place),
                        xytext=(5, 0),
                        textcoords="offset points",
                        va="center",
                        color=color,
                    )
            axes.set_xlim(0, 1.2 * top or 1)
            axes.set_xlabel(label)
            axes.grid(axis="x", alpha=0.25)
        both[0].set_yticks(range(len(rows)), [label for label, _ in rows])
        both[0].invert_yaxis()
        table = next(iter(report["cases"].values()))["table_mib"]
        figure.suptitle(
            f"Loading an MTP draft in vLLM {report['vllm']}: "
            f"vocabulary tables of {table:,.1f} MiB each"
        )
        handles, labels = both[0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=2, frameon=False
        )


def draw_parity(report: dict[str, Any], path: Path) -> None:
    """Write a PNG of the throughput of each server, stock beside patched.

    Args:
        report: What ``benchmarks.serve_parity`` writes as JSON.
        path: File to write.

    Raises:
        OSError: If it can't be written.
    """
    width = 0.36
    with drawing(path, 9, 4.8) as (figure, [axes]):
        for name, color, offset in (
            ("stock", STOCK, -width / 2),
            ("patched", PATCHED, width / 2),
        ):
            figures = report[name]["tokens_per_second"]
            places = [place + offset for place in range(len(figures["samples"]))]
            label = (
                f"{name}: median {figures['median']:,.1f} "
                f"({figures['min']:,.1f} to {figures['max']:,.1f})"
            )
            axes.bar(places, figures["samples"], width, color=color, label=label)
            for place, sample in zip(places, figures["samples"], strict=True):
                axes.annotate(
                    f"{sample:,.1f}",
                    (place, sample),
                    xytext=(0, -4),
                    textcoords="offset points",
                    ha="center",
                    va="top",
                    color="white",
                )
        pairs = range(report["repeats"])
        axes.set_xticks(pairs, [f"pair {number + 1}" for number in pairs])
        axes.set_ylabel("completion tokens per second")
        ratio = report["ratio"]
        axes.set_title(
            f"vllm serve {report['vllm']}, {report['requests']} requests by "
            f"{report['clients']} clients: patched / stock = {ratio['median']:.3f} "
            f"({ratio['min']:.3f} to {ratio['max']:.3f})"
        )
        axes.grid(axis="y", alpha=0.25)
        figure.legend(loc="outside lower center", ncols=2, frameon=False)


def _tables(case: dict[str, Any]) -> str:
    tables = f"{case['tables']} table{'s' if case['tables'] > 1 else ''}"
    each = f"{tables} of {case['table_mib']:,.1f} MiB"
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
    drawers = {
        # The first key that a report has tells which one it is.
        "caches": draw_load_times,
        "cases": draw_peaks,
        "clients": draw_parity,
        "dtype": draw_heads,
        "warm_ms": draw_start_cost,
        "two_tables_mib": draw,
    }
    draw_it = next(drawer for key, drawer in drawers.items() if key in report)
    draw_it(report, Path(sys.argv[2]))


if __name__ == "__main__":
    main()
