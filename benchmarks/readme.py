# SPDX-License-Identifier: Apache-2.0
"""Writes the measured figures into README.md: no figure there is typed by hand.

`python -m benchmarks.readme [--check]`, from the repository's root.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path("benchmarks", "results")
README = Path("README.md")
BEGIN = "<!-- figures: written by `make results` -->\n"
END = "<!-- end of figures -->\n"


def figures(
    demo: dict[str, Any], head: dict[str, Any], start_cost: dict[str, Any]
) -> str:
    """Return the section, in Markdown.

    Args:
        demo: What `benchmarks.demo` writes as JSON.
        head: What `benchmarks.head_construction` writes as JSON.
        start_cost: What `benchmarks.start_cost` writes as JSON.

    """
    stock, patched = demo["stock"], demo["patched"]
    machine, versions = demo["machine"], demo["versions"]
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
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    cold, warm, together = (
        start_cost[name] for name in ("cold", "warm", "cold_together")
    )
    return f"""\
A worker's anonymous memory, sampled while `vllm serve` loads a tiny Qwen3.5 with an MTP
head (`make demo`): two tables of {demo["two_tables_mib"] / 2:,.1f} MiB each, four
prompts at temperature zero, sent one at a time.

{table}

![Memory over time, stock and patched]({RESULTS / "demo.png"})

{_about_copies(demo)}{_about_head(head)}The plugin adds {warm["median_ms"]:.0f} ms \
({warm["min_ms"]:.0f} to \
{warm["max_ms"]:.0f}) to the start of a process, and {cold["median_ms"] / 1000:.1f} s \
({cold["min_ms"] / 1000:.1f} to {cold["max_ms"] / 1000:.1f}) to the
first one after vLLM or this package changed; to each of {len(together["samples_ms"])} \
that start at once then, {together["median_ms"] / 1000:.1f} s.

Measured on {demo["date"]}: vLLM {stock["vllm"]}, torch {versions["torch"]}, \
{machine["cores"]} cores of {_plain(machine["cpu"])},
no GPU, so with the legacy model runner. [Figures and samples]({RESULTS}).
"""


def _about_copies(demo: dict[str, Any]) -> str:
    if demo["peak_lower_by_mib"] < 1.5 * demo["two_tables_mib"]:
        return ""
    return (
        "Stock takes twice what the tables do, because on this processor vLLM also "
        "keeps a copy\nof each, repacked for its matrix kernels.\n\n"
    )


def _about_head(head: dict[str, Any]) -> str:
    stock, patched = (
        head[name]["allocated_mib"]["median"] for name in ("stock", "patched")
    )
    return (
        f"Building the head of one GLM MTP layer, {head['vocab_size']:,} x "
        f"{head['hidden_size']:,} in {head['dtype']},\nallocates {stock:,.3f} MiB on "
        f"stock and {patched:,.3f} MiB patched.\n\n"
    )


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
    results = (
        json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("demo", "head_construction", "start_cost")
    )
    new = f"{head}{BEGIN}{figures(*results)}{END}{tail}"
    if options.check and new != text:
        sys.exit(f"{README}: not what {RESULTS} says; run `make results`")
    README.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
