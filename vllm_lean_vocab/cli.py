# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-lean-vocab`."""

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_lean_vocab import diff, plan, versions
from vllm_lean_vocab.description import NoFigure
from vllm_lean_vocab.doctor import diagnose
from vllm_lean_vocab.edits import PullRequest
from vllm_lean_vocab.estimate import MTP, CantEstimate, estimate
from vllm_lean_vocab.export import KINDS, CantExport, DoesNotApply, Exported, export
from vllm_lean_vocab.git import GitFailed
from vllm_lean_vocab.series import SERIES

OK, CONFLICT, USAGE = 0, 1, 2
SOMETHING_OFF = 1


class Failure(Exception):
    """What the user asked for can't be done; says why and what helps."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Those after the command's name; default: `sys.argv`.

    Returns:
        Exit status: 0; 1 where a pull request conflicts, or is upstream and can't be
        exported, or where `doctor` found something to do; 2 for wrong usage, or where
        something is missing or in the way.

    """
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except BrokenPipeError:  # e.g. piped into `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except (
        Failure,
        CantExport,
        CantEstimate,
        GitFailed,
        NoFigure,
        diff.NoFormatter,
        OSError,
    ) as error:
        print(f"vllm-lean-vocab: {error}", file=sys.stderr)
        return CONFLICT if isinstance(error, DoesNotApply) else USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-lean-vocab",
        description="Shows what this patch set does to the installed vLLM. Serving "
        "needs no command: vLLM finds the plugin by itself.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--vllm",
        type=Path,
        metavar="DIR",
        help="a folder `vllm` with vLLM's Python files (default: the installed one)",
    )

    status = commands.add_parser(
        "status",
        parents=[common],
        help="state of each pull request: applies, upstream or conflict",
    )
    status.add_argument("--json", action="store_true", help="for scripts")
    status.set_defaults(run=_status)

    doctor = commands.add_parser(
        "doctor",
        help="what a vLLM process uses, and what to do about the rest",
        description="Starts a process that loads vLLM's plugins, and says for a bug "
        "report what is installed, what is in use and what to do. Exit status 1 where "
        "there is something to do.",
    )
    doctor.add_argument("--json", action="store_true", help="for scripts")
    doctor.add_argument(
        "--ray",
        nargs="?",
        const="auto",
        metavar="ADDRESS",
        help="also ask every node of a Ray cluster (default: this machine's)",
    )
    doctor.set_defaults(run=_doctor)

    show = commands.add_parser(
        "diff", parents=[common], help="the change to vLLM, as a diff"
    )
    show.add_argument(
        "id", nargs="?", metavar="ID", help="one pull request (default: all together)"
    )
    show.set_defaults(run=_diff)

    estimated = commands.add_parser(
        "estimate",
        help="what a model's draft will not allocate",
        description="Says which vocabulary tables the draft of a model has, and which "
        "of them are not allocated. Reads the model's config and the names of its "
        "tensors; needs no GPU and downloads nothing.",
    )
    estimated.add_argument(
        "model",
        metavar="MODEL",
        help="a directory, a config.json, or the id of a model in the local Hugging "
        "Face cache",
    )
    estimated.add_argument(
        "--speculative-config",
        type=_json_object,
        default=MTP,
        metavar="JSON",
        help=f"as for vllm serve (default: {json.dumps(MTP)})",
    )
    for name in ("tensor", "pipeline"):
        estimated.add_argument(
            f"--{name}-parallel-size",
            type=_positive,
            default=1,
            metavar="N",
            help="as for vllm serve",
        )
    estimated.add_argument(
        "--trust-remote-code", action="store_true", help="as for vllm serve"
    )
    estimated.add_argument("--json", action="store_true", help="for scripts")
    estimated.set_defaults(run=_estimate)

    exported = commands.add_parser(
        "export",
        parents=[common],
        help="a branch of vLLM, a patch file and a text of each pull request",
        description="Makes of each pull request a branch in a checkout of vLLM, or a "
        "patch file and a text, or all of them.",
    )
    exported.add_argument(
        "ids", nargs="*", metavar="ID", help="pull requests (default: all)"
    )
    exported.add_argument(
        "--onto",
        type=Path,
        metavar="DIR",
        help="a git checkout of vLLM: a branch of each, from the current commit, or "
        "from the branch of what it builds on; no working tree is touched",
    )
    exported.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where patch files and texts go, a folder for each; without --onto they "
        "are made against the installed vLLM",
    )
    exported.add_argument(
        "--replace", action="store_true", help="replace what an earlier export made"
    )
    exported.add_argument("--json", action="store_true", help="for scripts")
    exported.set_defaults(run=_export)
    return parser


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return found


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 or more")
    return int(text)


def _status(options: argparse.Namespace) -> int:
    root = _vllm_root(options.vllm)
    made = plan.make_plan(plan.read_sources(root, SERIES), SERIES)
    distribution = versions.of_vllm(root) if options.vllm is None else None
    version = distribution.version if distribution else None
    if options.json:
        rows = [status._asdict() for status in made.statuses]
        print(json.dumps({"vllm": version, "pull_requests": rows}, indent=2))
    else:
        print(f"vLLM {version or root / 'vllm'}")
        width = max(len(status.id) for status in made.statuses)
        for status in made.statuses:
            note = status.reason or status.variant
            print(f"  {status.id:{width}}  {status.state:8}  {note}".rstrip())
        if value := os.environ.get("VLLM_LEAN_VOCAB"):
            print(f"VLLM_LEAN_VOCAB={value} is set here: it decides what is served.")
        if options.vllm is None:
            # Only a process that has loaded all plugins knows; this reads files.
            print("What a vLLM process really uses: vllm-lean-vocab doctor")
    return CONFLICT if made.ids("conflict") else OK


def _doctor(options: argparse.Namespace) -> int:
    found = diagnose(_vllm_root(None), options.ray)
    print(json.dumps(found.to_json(), indent=2) if options.json else found)
    return SOMETHING_OFF if found.remedies else OK


def _diff(options: argparse.Namespace) -> int:
    root = _vllm_root(options.vllm)
    asked_for = _known([options.id] if options.id else [])
    wanted = plan.with_bases([each.id for each in asked_for], SERIES)
    upto = [pull_request for pull_request in SERIES if pull_request.id in wanted]

    sources = plan.read_sources(root, upto)
    # What it builds on is not part of its diff.
    base = plan.make_plan(sources, upto[:-1]).files if options.id else {}
    made = plan.make_plan(sources, upto)
    asked = [s for s in made.statuses if options.id in (None, s.id)]
    for status in asked:
        if status.state != "applies":
            reason = status.reason or "this vLLM has it already"
            print(f"vllm-lean-vocab: {status.id}: {reason}", file=sys.stderr)
    changed = made.changes(base)
    below = {p: diff.formatted(p, base[p]) for p in changed.keys() & base.keys()}
    text = diff.unified_diff({**sources, **below}, changed)
    is_coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print(diff.coloured(text) if is_coloured else text, end="")
    return CONFLICT if any(s.state == "conflict" for s in asked) else OK


def _estimate(options: argparse.Namespace) -> int:
    _vllm_root(None)  # without a vLLM, say so first
    if sys.stderr.isatty():
        print("Building the draft, stock and patched (some 10 s) ...", file=sys.stderr)
    found = estimate(
        options.model,
        options.speculative_config,
        options.tensor_parallel_size,
        options.pipeline_parallel_size,
        options.trust_remote_code,
    )
    print(json.dumps(found.to_json(), indent=2) if options.json else found)
    return OK


def _export(options: argparse.Namespace) -> int:
    if options.onto is None and options.out is None:
        raise Failure("export needs --onto DIR, a checkout of vLLM, or --out DIR")
    if options.onto is not None and options.vllm is not None:
        raise Failure("--vllm is for --out alone; with --onto the checkout is vLLM")
    made = export(
        _known(options.ids),
        SERIES,
        checkout=options.onto,
        sources=None
        if options.onto
        else plan.read_sources(_vllm_root(options.vllm), SERIES),
        out=options.out,
        replace=options.replace,
    )
    if options.json:
        print(json.dumps([each.to_json() for each in made], indent=2))
    else:
        _print_exported(made, options)
    return OK


def _print_exported(made: Sequence[Exported], options: argparse.Namespace) -> None:
    rows: list[tuple[str, ...]] = [
        ("pull request", "vLLM's files", "new files", "tests")
    ]
    rows += [(m.id, *(str(m.size(kind)) for kind in KINDS)) for m in made]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths)).rstrip())
    for each in made:
        for warning in each.warnings:
            print(f"vllm-lean-vocab: {warning}", file=sys.stderr)
    if options.onto:
        print(f"Branches in {options.onto}: {', '.join(m.branch for m in made)}")
    for each in made:
        if each.replaced and options.onto:
            print(f"{each.branch} was {each.replaced[:12]}")
    if options.out:
        print(f"Patch files and texts: {options.out}{os.sep}")
    print("No commit is signed off: that is for whoever submits it, after reading it.")


def _known(ids: Sequence[str]) -> list[PullRequest]:
    """Return the pull requests of these ids in the series' order; all if none."""
    known = [pull_request.id for pull_request in SERIES]
    if unknown := [id for id in ids if id not in known]:
        raise Failure(f"no pull request {unknown[0]!r}; known: {', '.join(known)}")
    return [each for each in SERIES if not ids or each.id in ids]


def _vllm_root(package: Path | None) -> Path:
    """Return the folder that holds the folder `vllm`."""
    if package is None:
        spec = importlib.util.find_spec("vllm")
        # A folder `vllm` without an __init__.py, such as ours, is not it.
        if spec is None or spec.origin is None:
            raise Failure("no vLLM is installed here; install one, or name --vllm DIR")
        package = Path(spec.origin).parent
    package = package.resolve()
    if package.name != "vllm" or not (package / "__init__.py").is_file():
        raise Failure(f"{package}: not a folder `vllm` with vLLM's Python files")
    return package.parent
