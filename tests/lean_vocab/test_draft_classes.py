# SPDX-License-Identifier: Apache-2.0
"""What becomes of every draft class's vocabulary tables, in vLLM's own loaders.

Each class is built, loaded and given the target's tables, stock and patched, as far as
that can be done on a CPU.
"""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file

from .draft_classes import (
    DEFERRED,
    DRAFT_CLASSES,
    FROM_0_33,
    NONE,
    NOT_BUILT,
    NOT_COVERED,
    OWN,
    UNLESS_NAMED,
    Tables,
)
from .draft_configs import DRAFTS, TABLE_BYTES, Config, Tensors
from .processes import run_script

LOAD = Path(__file__).with_name("load_draft_classes.py")
REMEDY = """\
vLLM loads {0} as a draft, which {1} doesn't know. See which tables the class builds, \
whether it has `has_own_embed_tokens` or `has_own_lm_head`, and who attaches the \
target's to it; say in {1} what becomes of them."""


class Case(NamedTuple):
    """One loading of one draft.

    Attributes:
        name: Of the draft in `DRAFTS`: the architecture, and how it differs.
        loader: Who loads it.
        own: Whether its checkpoint has tables of its own.

    """

    name: str
    loader: str
    own: bool

    @property
    def architecture(self) -> str:
        return self.name.partition(" ")[0]

    def __str__(self) -> str:
        return "-".join([self.name, self.loader, "own"][: 2 + self.own])


def cases() -> Iterator[Case]:
    for name, draft in DRAFTS.items():
        for loader in draft.loaders:
            # Variants that bring tables differ from the class only there.
            if " " not in name or not draft.own:
                yield Case(name, loader, False)
            if draft.own:
                yield Case(name, loader, True)


CASES = list(cases())


def registered() -> dict[str, Any]:
    """Return what vLLM may load as a draft, from its registry."""
    from vllm.model_executor.models import registry

    others = registry._TRANSFORMERS_BACKEND_MODELS.items()
    mtp = {name: entry for name, entry in others if name.endswith("MTP")}
    return registry._SPECULATIVE_DECODING_MODELS | mtp


def tables_of(architecture: str) -> Tables | None:
    known = DRAFT_CLASSES
    if "TransformersForMTP" in registered():  # vLLM 0.33
        known = DRAFT_CLASSES | FROM_0_33
    return known.get(architecture)


def test_every_class_is_in_a_category() -> None:
    unknown = sorted(name for name in registered() if tables_of(name) is None)
    assert not unknown, REMEDY.format(", ".join(unknown), "draft_classes.py")


def test_every_class_is_built_or_said_not_to_be() -> None:
    entries = registered()
    built = {entries[c.architecture] for c in CASES if c.architecture in entries}
    missing = {n for n, e in entries.items() if n not in NOT_BUILT and e not in built}
    unread = missing - FROM_0_33.keys()
    assert not unread, REMEDY.format(", ".join(sorted(unread)), "draft_configs.py")


def test_an_unknown_class_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.models import registry

    entry = ("new_mtp", "NewMTP")
    monkeypatch.setitem(registry._SPECULATIVE_DECODING_MODELS, "NewMTPModel", entry)
    for check in (
        test_every_class_is_in_a_category,
        test_every_class_is_built_or_said_not_to_be,
    ):
        with pytest.raises(AssertionError, match="vLLM loads NewMTPModel as a draft"):
            check()


def test_every_exception_has_a_reason() -> None:
    for architecture, tables in (DRAFT_CLASSES | FROM_0_33).items():
        if {OWN, NOT_COVERED} & {tables.embedding, tables.lm_head}:
            assert tables.why, architecture


def write(path: Path, config: Config, tensors: Tensors) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    if tensors:
        real = {
            name: torch.full(shape, value, dtype=torch.bfloat16)
            for name, (shape, value) in tensors.items()
        }
        save_file(real, path / "model.safetensors")
    return path


def job_of(case: Case, root: Path) -> dict[str, Any]:
    """Write what a case is loaded from, and return the job."""
    draft = DRAFTS[case.name]
    tensors = draft.tensors | (draft.own if case.own else {})
    path = root / str(case).replace(" ", "-")
    target = write(path / "target", draft.target, {} if draft.draft else tensors)
    speculative: dict[str, Any] = {"method": draft.method, "num_speculative_tokens": 1}
    if draft.draft is not None:
        speculative["model"] = str(write(path / "draft", draft.draft, tensors))
    return {
        "model": str(target),
        "speculative_config": speculative,
        "loader": case.loader,
        "load_format": "auto" if tensors else "dummy",
        **draft.job,
    }


Reports = dict[Case, dict[str, Any]]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Reports, Reports]:
    """What became of each draft, stock and patched."""
    root = tmp_path_factory.mktemp("drafts")
    jobs = [job_of(case, root) for case in CASES]

    def load_all(switch: str) -> Reports:
        return dict(zip(CASES, run_script(LOAD, jobs, switch, root), strict=True))

    with ThreadPoolExecutor() as pool:
        stock, patched = pool.map(load_all, ("0", "draft_vocab"))
    return stock, patched


def table_of(path: str) -> str:
    """Return which field of `Tables` a module's path belongs to."""
    if path.endswith("embed_tokens"):
        return "embedding"
    return "lm_head" if re.search(r"(^|\.)(lm_head|head$)", path) else "another"


def sizes(tables: dict[str, dict[str, Any]], kind: str = "") -> dict[str, int]:
    """Return by path the sizes of tables, if need be of those of one kind."""
    return {
        path: table["nbytes"]
        for path, table in tables.items()
        if kind in ("", table_of(path))
    }


@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_on_stock(loaded: tuple[Reports, Reports], case: Case) -> None:
    """The same modules are the target's, and the same are the draft's own."""
    stock, patched = (reports[case] for reports in loaded)
    assert "error" not in stock, stock["error"]
    assert "error" not in patched, patched["error"]
    assert patched["draft"] == stock["draft"]
    assert patched["target's"] == stock["target's"]
    assert sizes(patched["own"]) == sizes(stock["own"])
    assert not patched["meta"]
    assert patched["built"]["allocated"] <= stock["built"]["allocated"]


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name == c.architecture], ids=str
)
@pytest.mark.parametrize("table", Tables._fields[:2])
def test_tables(loaded: tuple[Reports, Reports], case: Case, table: str) -> None:
    """A table is what `DRAFT_CLASSES` says."""
    stock, patched = (reports[case] for reports in loaded)
    tables = tables_of(case.architecture)
    assert tables is not None
    becomes = getattr(tables, table)
    before, after = (sizes(r["built"]["tables"], table) for r in (stock, patched))
    own = DRAFTS[case.name].own if case.own else {}
    named = any(table_of(name.removesuffix(".weight")) == table for name in own)
    if becomes == UNLESS_NAMED:
        becomes = OWN if named else DEFERRED
    if becomes == NONE:
        assert not sum(before.values())
        assert not sum(after.values())
    elif becomes == DEFERRED:
        assert set(before.values()) == {TABLE_BYTES}
        assert set(after.values()) == {0}
        assert after.keys() <= patched["target's"].keys()
    else:
        assert set(before.values()) == {TABLE_BYTES}
        assert after == before
        assert {path in patched["own"] for path in after} == {becomes == OWN}
    if named:
        value = {"embedding": 3.0, "lm_head": 4.0}[table]
        assert {patched["own"][path]["value"] for path in after} == {value}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_storage_at_any_moment(loaded: tuple[Reports, Reports], case: Case) -> None:
    """The allocations tell the same as the modules."""
    stock, patched = (reports[case] for reports in loaded)
    for report in (stock, patched):
        largest = max(sizes(report["built"]["tables"]).values(), default=0)
        assert (report["built"]["allocated"] > 0) == (largest >= TABLE_BYTES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_estimate(loaded: tuple[Reports, Reports], case: Case) -> None:
    """What is said of a draft beforehand is what its loading does."""
    for report in (reports[case] for reports in loaded):
        estimated, built = report["estimated"], report["built"]["tables"]
        if case.architecture == "MedusaModel":
            assert "'medusa'" in estimated["error"]
            continue
        assert estimated["draft"] == report["draft"]
        tables = estimated["tables"]
        places = {path for path in built if table_of(path) != "another"}
        assert places <= tables.keys() <= built.keys()
        for path, table in tables.items():
            assert table["deferred"] == (built[path]["nbytes"] == 0)
            assert table["deferred"] or table["bytes"] == built[path]["nbytes"]
