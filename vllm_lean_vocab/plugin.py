# SPDX-License-Identifier: Apache-2.0
"""The `vllm.general_plugins` entry point: each vLLM process calls `register`.

Nothing that goes wrong here may stop vLLM or leave it half patched: all is prepared
first, the finder is installed last, and any exception ends in one warning.
"""

import contextlib
import hashlib
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vllm_lean_vocab import cache, importer, plan
from vllm_lean_vocab.edits import PullRequest
from vllm_lean_vocab.series import SERIES

VARIABLE = "VLLM_LEAN_VOCAB"
DEFERRED_VOCAB = "vllm.model_executor.models.deferred_vocab"

# Handlers are on the logger "vllm", so ours has to be below it.
logger = logging.getLogger("vllm.lean_vocab")

_in_use: list[str] = []


def register() -> None:
    """Serve the pull requests that apply to this vLLM; never raises.

    `VLLM_LEAN_VOCAB` chooses: `0` none, unset or `1` all, else a comma-separated list
    of ids. Relies on `vllm.plugins.load_general_plugins`, which calls this before model
    files, proposers and draft loaders are imported.
    """
    try:
        _declare_variable()
        asked = os.environ.get(VARIABLE, "").strip()
        if asked != "0":
            _register(asked)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of LibCST's parser is no Exception
        _warn(f"off, vLLM runs unpatched: {_described(error)}")


def in_use() -> Sequence[str]:
    """Return the ids of the pull requests that this process serves."""
    return tuple(_in_use)


def _declare_variable() -> None:
    """Make vLLM know the variable: else it warns, or refuses to start if so told."""
    from vllm import envs

    envs.environment_variables.setdefault(VARIABLE, lambda: os.environ.get(VARIABLE))


def _register(asked: str) -> None:
    import vllm
    from vllm import envs
    from vllm.platforms import current_platform

    asked_ids = {word.strip() for word in asked.split(",") if word.strip()} - {"1"}
    if not asked_ids and current_platform.is_out_of_tree():
        _warn(
            "off: this platform comes from a plugin, whose proposer may not attach the "
            f"target's modules. To turn it on all the same: {VARIABLE}="
            + ",".join(pull_request.id for pull_request in SERIES)
        )
        return
    wanted = _choose(asked_ids)
    if not wanted:
        return

    root = Path(vllm.__path__[0]).parent
    selected, reasons = wanted, []
    while True:
        sources = {path: _read(root / path) for path in plan.source_paths(selected)}
        key = cache.key_of([*_own_files(selected), *sources.items()])
        made, folder = cache.cached_plan(
            Path(envs.VLLM_CACHE_ROOT) / "lean_vocab",
            key,
            partial(_make_plan, sources, selected),
        )
        swaps, too_early = _catch_up(made, folder, sources)
        if not too_early:
            break
        selected, off = _without(too_early, selected)
        reasons += off

    reasons += [f"{s.id}: {s.reason}" for s in made.statuses if s.state == "conflict"]
    if reasons:
        _warn(f"off on vLLM {vllm.__version__}: {'; '.join(reasons)}")
    if made.files:
        news = f"on with vLLM {vllm.__version__}: {', '.join(made.ids('applies'))}"
        announce = _Announce(news)
        finder = importer.PatchedFinder(folder, made.files, announce, announce.bypassed)
        importer.install(finder, swaps)
    _in_use[:] = made.ids("applies") if made.files else []


def _choose(asked_ids: Collection[str]) -> list[PullRequest]:
    """Return what is asked for, or all, with what it builds on."""
    known = [pull_request.id for pull_request in SERIES]
    if unknown := sorted(set(asked_ids) - set(known)):
        _warn(f"{VARIABLE}: unknown: {', '.join(unknown)}. Known: {', '.join(known)}")
    return _among(plan.with_bases(asked_ids or known, SERIES))


def _catch_up(
    made: plan.Plan, folder: Path, sources: Mapping[str, bytes | None]
) -> tuple[list[importer.Swap], dict[str, str]]:
    """Return how to patch modules that are imported already, or why that can't be."""
    swaps: list[importer.Swap] = []
    too_early: dict[str, str] = {}
    for path in importer.imported_too_early(list(made.files)):
        try:
            stock = (sources[path] or b"").decode("utf-8")
            name = importer.module_name(path)
            swaps += importer.swaps(name, stock, made.files[path], folder / path)
        except importer.TooEarly as error:
            too_early[path] = str(error)
    return swaps, too_early


def _without(
    too_early: Mapping[str, str], selected: Sequence[PullRequest]
) -> tuple[list[PullRequest], list[str]]:
    """Leave out what edits one of the files, and what builds on it."""
    ids = {pull_request.id for pull_request in selected}
    reasons: list[str] = []
    for pull_request in selected:
        edited = {*pull_request.edited_paths, *pull_request.new_files}
        early = sorted(edited & too_early.keys())
        missing = sorted(set(pull_request.builds_on) - ids)
        if early:
            reasons.append(
                f"{pull_request.id}: {importer.module_name(early[0])} was imported "
                f"before vLLM loaded its plugins, and {too_early[early[0]]} (import it "
                "later, or not at the top of a script)"
            )
        elif missing:
            reasons.append(f"{pull_request.id}: builds on {missing[0]}")
        else:
            continue
        ids.discard(pull_request.id)
    return _among(ids), reasons


def _among(ids: Collection[str]) -> list[PullRequest]:
    return [pull_request for pull_request in SERIES if pull_request.id in ids]


def _own_files(selected: Sequence[PullRequest]) -> list[tuple[str, bytes | None]]:
    """Return what of this package shapes a plan."""
    package = Path(__file__).parent
    code = [*package.glob("*.py"), *package.glob("series/*.py")]
    new = [plan.repository_file(path) for p in selected for path in p.new_files]
    ids = ",".join(pull_request.id for pull_request in selected)
    return [
        ("ids", ids.encode()),
        *((path.name, _read(path)) for path in sorted([*code, *new])),
    ]


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _make_plan(
    sources: Mapping[str, bytes | None], selected: Sequence[PullRequest]
) -> plan.Plan:
    texts = {
        path: None if content is None else content.decode("utf-8")
        for path, content in sources.items()
    }
    return plan.make_plan(texts, selected)


class _Announce:
    """Says what is on when the first patched module is used.

    Not earlier: in its main process vLLM sets up logging after it has loaded plugins.
    """

    def __init__(self, news: str) -> None:
        self.news = news

    def __call__(self, module: Any) -> None:
        with contextlib.suppress(Exception):  # vLLM is in the middle of an import
            if module.__name__ == DEFERRED_VOCAB:
                module.REMEDY += f" {VARIABLE}=0 lets drafts allocate their own tables."
            if self.news:
                news, self.news = self.news, ""
                logger.info("vllm-lean-vocab: %s (%s=0 turns it off)", news, VARIABLE)

    def bypassed(self, message: str, withdrawn: bool) -> None:
        """Say that another finder took a module that was to be patched."""
        if withdrawn:
            self.news = ""
            _in_use.clear()
            _warn(f"off, vLLM runs unpatched: {message}")
        else:
            _warn(f"vLLM runs partly patched: {message} ({VARIABLE}=0 turns it off)")


def _described(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # it can't even say what it is
        return type(error).__name__


def _warn(message: str) -> None:
    """Warn, once for a vLLM and the processes that it starts; never raises."""
    with contextlib.suppress(Exception):
        # Paths may hold bytes that aren't UTF-8.
        encoded = message.encode("utf-8", "backslashreplace")
        digest = hashlib.sha256(encoded).hexdigest()[:16]
        said = os.environ.get("LEAN_VOCAB_WARNED", "")
        if digest not in said:
            os.environ["LEAN_VOCAB_WARNED"] = f"{said} {digest}".strip()
            logger.warning("vllm-lean-vocab: %s", encoded.decode())
