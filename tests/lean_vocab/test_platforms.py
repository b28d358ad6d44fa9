# SPDX-License-Identifier: Apache-2.0
"""Platforms that bring a proposer of their own, with the pull requests asked for.

A placeholder that such a proposer leaves ends the start with the switch's name, before
anything is served.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from .processes import run_script
from .test_draft_classes import Case, job_of

LOAD = Path(__file__).with_name("load_with_stand_ins.py")
SWITCH = "VLLM_LEAN_VOCAB=0 lets drafts allocate their own tables."
# By proposer: when a draft with placeholders fails, and what the message names.
PROPOSERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "own load_model": ("", ()),
    "own load_model, no head": ("start", ("head",)),
    "own load_model, nothing": ("start", ("embed_tokens", "head")),
    "own _maybe_share_lm_head": ("load", ("head",)),
    "own _maybe_share_embeddings": ("load", ("embed_tokens",)),
    "no subclass": ("", ()),
    "no subclass, nothing": ("start", ("embed_tokens", "head")),
}
WITH_PLACEHOLDERS = ("Qwen3_5MTP", "Glm4MoeMTPModel")
# Covered by the change for all drafts, which is about vLLM's own proposers.
OTHER = "DeepSeekMTPModel"
CASES = [(d, p) for d in (*WITH_PLACEHOLDERS, OTHER) for p in PROPOSERS]
Reports = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Reports, Reports]:
    """What became of each draft, stock and patched."""
    root = tmp_path_factory.mktemp("platforms")
    drafts = {
        name: job_of(Case(name, "legacy", False), root)
        for name in (*WITH_PLACEHOLDERS, OTHER)
    }
    jobs = [{**drafts[draft], "proposer": proposer} for draft, proposer in CASES]

    def load_all(switch: str) -> Reports:
        return dict(zip(CASES, run_script(LOAD, jobs, switch, root), strict=True))

    asked_for = "qwen3_5_mtp,glm_mtp,draft_vocab"
    with ThreadPoolExecutor() as pool:
        stock, patched = pool.map(load_all, ("0", asked_for))
    return stock, patched


@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("draft", WITH_PLACEHOLDERS)
def test_a_placeholder_that_is_left(
    loaded: tuple[Reports, Reports], draft: str, proposer: str
) -> None:
    stock, patched = (reports[draft, proposer] for reports in loaded)
    failed, names = PROPOSERS[proposer]
    assert "error" not in stock and "error" not in patched, patched["error"]
    assert stock["failed"] == "" and patched["failed"] == failed
    assert (SWITCH in patched["message"]) == bool(failed)
    modules, _, _ = patched["message"].partition("left unallocated")
    for name in ("embed_tokens", "head"):
        assert (name in modules) == (name in names)
    if not failed:
        assert patched["own"] == stock["own"] == []


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_all_other_drafts_start_as_on_stock(
    loaded: tuple[Reports, Reports], proposer: str
) -> None:
    stock, patched = (reports[OTHER, proposer] for reports in loaded)
    assert patched == stock and patched["failed"] == ""
