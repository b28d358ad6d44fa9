# SPDX-License-Identifier: Apache-2.0
"""Drafts in other load formats, and weights that are loaded into a draft once more."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from .load_again import VALUE
from .processes import run_script
from .test_draft_classes import Case, job_of

LOAD = Path(__file__).with_name("load_again.py")
DRAFTS = ("Qwen3_5MTP", "Glm4MoeMTPModel", "DeepSeekMTPModel", "ErnieMTPModel")
SHARDED, DUMMY, RELOAD = "sharded_state", "dummy", "reload"
# vLLM doesn't load what it saves of it: latent attention gives up a weight.
FAILING_ON_STOCK = ("DeepSeekMTPModel", SHARDED)
# Formats that a package of their own is needed for.
PACKAGES = {
    "fastsafetensors": "fastsafetensors",
    "runai_streamer": "runai_model_streamer",
}
Reports = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Reports, Reports]:
    """What became of each draft, stock and patched."""
    root = tmp_path_factory.mktemp("drafts")
    installed = [n for n, p in PACKAGES.items() if importlib.util.find_spec(p)]
    saving: list[dict[str, Any]] = []
    loading: dict[tuple[str, str], dict[str, Any]] = {}
    for name in DRAFTS:
        job = job_of(Case(name, "legacy", False), root)
        saved = str(root / f"{name}-sharded")
        saving.append({**job, "do": "save", "to": saved})
        loading[name, SHARDED] = {**job, "model": saved, "load_format": SHARDED}
        for load_format in ("safetensors", DUMMY, *installed):
            loading[name, load_format] = {**job, "load_format": load_format}
        loading[name, RELOAD] = {**job, "do": RELOAD}
    jobs = [{"do": "load", **job} for job in loading.values()]
    stock = run_script(LOAD, [*saving, *jobs], "0", root)[len(saving) :]
    patched = run_script(LOAD, jobs, "1", root)
    return dict(zip(loading, stock)), dict(zip(loading, patched))


@pytest.mark.parametrize("kind", [SHARDED, "safetensors", DUMMY, RELOAD, *PACKAGES])
@pytest.mark.parametrize("draft", DRAFTS)
def test_as_on_stock(loaded: tuple[Reports, Reports], draft: str, kind: str) -> None:
    if kind in PACKAGES and not importlib.util.find_spec(PACKAGES[kind]):
        pytest.skip(f"{PACKAGES[kind]} is not installed")
    stock, patched = (reports[draft, kind] for reports in loaded)
    if (draft, kind) == FAILING_ON_STOCK:
        assert "kv_b_proj" in stock["error"] and patched == stock
        return
    if kind in PACKAGES and "error" in stock:  # e.g. it wants a GPU
        assert patched == stock
        return
    assert "error" not in stock and "error" not in patched, (stock, patched)
    assert patched["target's"] == stock["target's"]
    assert set(stock["target's"].values()) == {"embed_tokens", "lm_head"}
    # Weights that are loaded once more reach what is attached.
    expected = {"embed_tokens": 1.0, "lm_head": 2.0}
    if kind == RELOAD:
        expected = dict.fromkeys(expected, VALUE)
    assert patched["tables"] == stock["tables"] == expected
    # What a checkpoint lacks here is not initialized.
    if kind in (SHARDED, DUMMY):
        assert patched["digest"] == stock["digest"]
