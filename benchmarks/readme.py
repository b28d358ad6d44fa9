# SPDX-License-Identifier: Apache-2.0
"""Writes the measured figures into README.md: no figure there is typed by hand.

`python -m benchmarks.readme [--check]`, from the repository's root.
"""

import argparse
import json
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_lean_vocab.estimate import Estimate, Table

RESULTS = Path("benchmarks", "results")
README = Path("README.md")
BEGIN = "<!-- figures: written by `make bench` -->\n"
END = "<!-- end of figures -->\n"


def figures(results: Mapping[str, dict[str, Any]]) -> str:
    """Return the section, in Markdown.

    Args:
        results: What the benchmarks write as JSON, by the names of their files.

    """
    parts = [part(results[name]) for name, part in PARTS.items()]
    return "\n\n".join([*parts, _measured_on(results["demo"])]) + "\n"


def about_demo(demo: dict[str, Any]) -> str:
    """Return the demo's table and plot."""
    stock, patched = demo["stock"], demo["patched"]
    rows = [
        ("", "stock", "patched"),
        ("---", "---:", "---:"),
        *(
            (label, *(f"{run['memory'][key]:,.1f} MiB" for run in (stock, patched)))
            for label, key in (
                ("before the draft loads", "before_mib"),
                ("**peak while it loads**", "peak_mib"),
                ("**that is, for the draft**", "peak_above_before_mib"),
                ("ready to serve, KV cache included", "after_mib"),
            )
        ),
        *(
            (label, *(f"{run['usage'][key]:,}" for run in (stock, patched)))
            for label, key in (
                ("prompt tokens", "prompt_tokens"),
                ("completion tokens", "completion_tokens"),
            )
        ),
        *(
            (label, *(f"{run[key]:,}" for run in (stock, patched)))
            for label, key in (
                ("drafts", "drafts"),
                ("accepted draft tokens", "accepted_tokens"),
            )
        ),
        ("text", *_texts(stock, patched)),
    ]
    parts = [
        _paragraph(
            "A worker's anonymous memory, sampled while `vllm serve` loads a tiny "
            "Qwen3.5 with an MTP head (`make demo`): two tables of "
            f"{demo['two_tables_mib'] / 2:,.1f} MiB each, four prompts at temperature "
            "zero, sent one at a time."
        ),
        _table(rows),
        f"![Memory over time, stock and patched]({RESULTS / 'demo.png'})",
    ]
    if demo["peak_lower_by_mib"] >= 1.5 * demo["two_tables_mib"]:
        parts.append(
            _paragraph(
                "Stock takes twice what the tables do, because on this processor vLLM "
                "also keeps a copy of each, repacked for its matrix kernels."
            )
        )
    return "\n\n".join(parts)


def about_load_peak(report: dict[str, Any]) -> str:
    """Return the loading peaks of all families that were served, and their plot."""
    rows = [
        ("", "tables on a rank", "stock", "patched", "the draft owns", "output"),
        ("---", "---:", "---:", "---:", "---:", "---"),
    ]
    for case in report["cases"].values():
        figures = (
            case["tables"] * case["table_mib"],
            *(case[n]["peak_above_before_mib"]["median"] for n in ("stock", "patched")),
            case["draft_owns_mib"],
        )
        same = "identical" if case["identical"] else "different"
        cells = (f"{mib:,.1f}" for mib in figures)
        rows.append((case["description"], *cells, same))
    parts = [
        _paragraph(
            "The same for other models, with a real engine for each: how far the peak "
            f"stands above the level before, in MiB (median of {report['repeats']}, "
            "alternating), and what the draft's own tensors take, the least that is "
            "possible. Tokens, drafts and accepted drafts are the output; "
            "`vllm-lean-vocab estimate` said the same of the tables beforehand."
        ),
        _table(rows),
        f"![Loading peaks, stock and patched]({RESULTS / 'load_peak.png'})",
    ]
    return "\n\n".join(parts)


def about_draft_load_time(report: dict[str, Any]) -> str:
    """Return what loading the draft takes."""
    one, sharded = (report["cases"][n] for n in ("qwen3_5", "qwen3_5_sharded"))
    seconds = [
        case[cache]["part_of_seconds"]
        for case in (one, sharded)
        for cache in report["caches"]
    ]
    with_collections = [
        case[cache]["part_with_collections"]
        for case in (one, sharded)
        for cache in report["caches"]
    ]
    stock, patched = (
        sharded["cold"][n]["read_mib"]["median"] for n in ("stock", "patched")
    )
    return _paragraph(
        f"The draft loads in {min(seconds):.0%} to {max(seconds):.0%} of the time that "
        "it takes on stock, as one file and in shards, with a cold page cache and a "
        "warm one, without the two garbage collections that vLLM makes whatever is "
        f"loaded ({min(with_collections):.0%} to {max(with_collections):.0%} with "
        "them). Where tables have shards of their own, it reads "
        f"{patched:,.1f} MiB from disk instead of {stock:,.1f}."
    )


def about_parity(report: dict[str, Any]) -> str:
    """Return how patched servers compare with stock under load."""
    ratio = report["ratio"]
    same = "the same" if report["identical"] else "different"
    return _paragraph(
        f"Under load ({report['requests']} requests by {report['clients']} clients, "
        f"{report['repeats']} servers of each kind in turn), throughput is "
        f"{ratio['median']:.2f} of stock's ({ratio['min']:.2f} to "
        f"{ratio['max']:.2f}), and text and usage of each request are {same}."
    )


def about_estimate(report: dict[str, Any]) -> str:
    """Return what is said of a well-known shape beforehand."""
    fields = {name: report[name] for name in Estimate._fields}
    tables = [Table(**table) for table in report["tables"]]
    estimate = Estimate(**{**fields, "tables": tables})
    return "\n\n".join(
        [
            _paragraph(
                "What it will be for a model, `vllm-lean-vocab estimate` says "
                "beforehand. Of Qwen3.8-27B's vocabulary, hidden size and data type:"
            ),
            textwrap.indent(
                f"$ vllm-lean-vocab estimate {estimate.model}\n{estimate}", "    "
            ),
        ]
    )


def about_head(head: dict[str, Any]) -> str:
    """Return what building a head allocates."""
    stock, patched = (
        head[name]["allocated_mib"]["median"] for name in ("stock", "patched")
    )
    return _paragraph(
        f"Building the head of one GLM MTP layer, {head['vocab_size']:,} x "
        f"{head['hidden_size']:,} in {head['dtype']}, allocates {stock:,.3f} MiB on "
        f"stock and {patched:,.3f} MiB patched."
    )


def about_start_cost(report: dict[str, Any]) -> str:
    """Return what the plugin adds to the start of processes, and of a server."""
    warm, cold, together = (
        report[f"{name}_ms"] for name in ("warm", "cold", "cold_together")
    )
    text = (
        f"The plugin adds {warm['median']:.1f} ms ({warm['min']:.1f} to "
        f"{warm['max']:.1f}) to the start of a process, and "
        f"{cold['median'] / 1000:.1f} s ({cold['min'] / 1000:.1f} to "
        f"{cold['max'] / 1000:.1f}) to the first one after vLLM or this package "
        f"changed; to each of {len(together['samples'])} that start at once then, "
        f"{together['median'] / 1000:.1f} s."
    )
    if ready := report.get("serve_ready"):  # not with --no-serve
        stock, patched = ready["stock_s"], ready["patched_s"]
        text += (
            f" `vllm serve` is ready after {stock['median']:.1f} s on stock "
            f"({stock['min']:.1f} to {stock['max']:.1f}) and after "
            f"{patched['median']:.1f} s patched ({patched['min']:.1f} to "
            f"{patched['max']:.1f})."
        )
    return _paragraph(text)


# A part for each file, in the order of the section. One more benchmark is a function
# more and a line more.
PARTS: Mapping[str, Callable[[dict[str, Any]], str]] = {
    "demo": about_demo,
    "estimate": about_estimate,
    "load_peak": about_load_peak,
    "head_construction": about_head,
    "draft_load_time": about_draft_load_time,
    "serve_parity": about_parity,
    "start_cost": about_start_cost,
}


def _measured_on(demo: dict[str, Any]) -> str:
    machine, versions = demo["machine"], demo["versions"]
    return _paragraph(
        f"Measured on {demo['date']}: vLLM {demo['stock']['vllm']}, torch "
        f"{versions['torch']}, {machine['cores']} cores of {_plain(machine['cpu'])}, "
        "no GPU, so with the legacy model runner. "
        f"[Figures and samples]({RESULTS})."
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _paragraph(text: str) -> str:
    return textwrap.fill(text, 88, break_long_words=False, break_on_hyphens=False)


def _texts(stock: dict[str, Any], patched: dict[str, Any]) -> tuple[str, str]:
    same = "identical" if stock["texts"] == patched["texts"] else "different"
    return "", same


def _plain(cpu: str) -> str:
    return cpu.replace("(R)", "").replace("(TM)", "").partition(" @ ")[0]


def main() -> None:
    """Write the section, or check that it is as the results say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    results = {
        name: json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        for name in PARTS
    }
    new = f"{head}{BEGIN}{figures(results)}{END}{tail}"
    if options.check and new != text:
        sys.exit(f"{README}: not what {RESULTS} says; run `make bench`")
    README.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
