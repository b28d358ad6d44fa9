# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-lean-vocab`."""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_lean_vocab import diff, plan
from vllm_lean_vocab.edits import PullRequest
from vllm_lean_vocab.series import SERIES

OK, CONFLICT, USAGE = 0, 1, 2


class Failure(Exception):
    """What the user asked for can't be done; says why and what helps."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Those after the command's name; default: `sys.argv`.

    Returns:
        Exit status: 0; 1 where a pull request conflicts; 2 for wrong usage, or where
        there is no vLLM.

    """
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (Failure, diff.NoFormatter) as error:
        print(f"vllm-lean-vocab: {error}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:  # e.g. piped into `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


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

    show = commands.add_parser(
        "diff", parents=[common], help="the change to vLLM, as a diff"
    )
    show.add_argument(
        "id", nargs="?", metavar="ID", help="one pull request (default: all together)"
    )
    show.set_defaults(run=_diff)
    return parser


def _status(options: argparse.Namespace) -> int:
    root = _vllm_root(options.vllm)
    made = plan.make_plan(_sources(root, SERIES), SERIES)
    version = _version(root) if options.vllm is None else None
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
    return CONFLICT if made.ids("conflict") else OK


def _diff(options: argparse.Namespace) -> int:
    root = _vllm_root(options.vllm)
    known = [pull_request.id for pull_request in SERIES]
    if options.id not in (None, *known):
        raise Failure(f"no pull request {options.id!r}; known: {', '.join(known)}")
    wanted = plan.with_bases([options.id] if options.id else known, SERIES)
    upto = [pull_request for pull_request in SERIES if pull_request.id in wanted]

    sources = before = _sources(root, upto)
    if options.id:  # what it builds on is not part of its diff
        before = {**sources, **plan.make_plan(sources, upto[:-1]).files}
    made = plan.make_plan(sources, upto)
    asked = [s for s in made.statuses if options.id in (None, s.id)]
    for status in asked:
        if status.state != "applies":
            reason = status.reason or "this vLLM has it already"
            print(f"vllm-lean-vocab: {status.id}: {reason}", file=sys.stderr)
    changed = {
        path: text for path, text in made.files.items() if before.get(path) != text
    }
    print(diff.unified_diff(before, changed), end="")
    return CONFLICT if any(s.state == "conflict" for s in asked) else OK


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


def _version(root: Path) -> str | None:
    """Return the version of the installed vLLM, whichever package brought it."""
    distributions = importlib.metadata.packages_distributions().get("vllm", [])
    for name in distributions:
        distribution = importlib.metadata.distribution(name)
        if Path(str(distribution.locate_file("vllm"))).resolve().parent == root:
            return distribution.version
    return None


def _sources(root: Path, series: Sequence[PullRequest]) -> dict[str, str | None]:
    sources: dict[str, str | None] = {}
    for path in plan.source_paths(series):
        try:
            sources[path] = (root / path).read_text(encoding="utf-8")
        except FileNotFoundError:
            sources[path] = None
    return sources
