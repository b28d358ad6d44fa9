# SPDX-License-Identifier: Apache-2.0
"""The pull requests, on the vLLM that is installed."""

import ast
import difflib
import importlib.util
from collections.abc import Mapping
from pathlib import Path

import pytest

from vllm_lean_vocab.edits import In, Insert, PullRequest, Replace
from vllm_lean_vocab.plan import (
    Plan,
    make_plan,
    repository_file,
    source_paths,
    with_bases,
)
from vllm_lean_vocab.series import SERIES

IDS = [pull_request.id for pull_request in SERIES]
MODEL = "vllm/model_executor/models/qwen3_5_mtp.py"
DEFERRED_VOCAB = "vllm/model_executor/models/deferred_vocab.py"
PROPOSER = "vllm/v1/spec_decode/llm_base_proposer.py"
V2_LOADER = "vllm/v1/worker/gpu/spec_decode/eagle/utils.py"

Sources = dict[str, str | None]


@pytest.fixture(scope="module")
def installed() -> Sources:
    """Return the text of vLLM's own files, as they are installed."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0]).parent
    return {
        path: (root / path).read_text() if (root / path).exists() else None
        for path in source_paths(SERIES)
    }


@pytest.fixture(scope="module")
def plan(installed: Sources) -> Plan:
    """Return the plan for all pull requests on this vLLM."""
    return make_plan(installed, SERIES)


def selected(*ids: str) -> list[PullRequest]:
    wanted = with_bases(ids, SERIES)
    return [pull_request for pull_request in SERIES if pull_request.id in wanted]


def text_of(sources: Mapping[str, str | None], path: str) -> str:
    text = sources[path]
    assert text is not None
    return text


def changed_lines(old: str, new: str) -> tuple[list[str], list[str]]:
    """Return the lines taken out and those put in."""
    lines = list(difflib.ndiff(old.splitlines(), new.splitlines()))
    return (
        [line[2:].strip() for line in lines if line[0] == "-"],
        [line[2:].strip() for line in lines if line[0] == "+"],
    )


# ------------------------------------------------------------------------- entries


def test_ids_are_the_names_of_the_modules() -> None:
    assert len(set(IDS)) == len(IDS)
    for pull_request in SERIES:
        spec = importlib.util.find_spec(f"vllm_lean_vocab.series.{pull_request.id}")
        assert spec is not None


def test_pull_requests_build_on_earlier_ones() -> None:
    for number, pull_request in enumerate(SERIES):
        assert set(pull_request.builds_on) <= set(IDS[:number])
        if any("deferred_vocab" in _code(edits) for edits in pull_request.edits):
            assert "deferred_vocab" in {pull_request.id, *pull_request.builds_on}


def _code(edits: In) -> str:
    return "\n".join(e.code if isinstance(e, Insert) else e.new for e in edits.edits)


@pytest.mark.parametrize("pull_request", SERIES, ids=IDS)
def test_files_of_the_repository_exist(pull_request: PullRequest) -> None:
    assert pull_request.title and pull_request.tests
    for path in (*pull_request.new_files, *pull_request.tests):
        file = repository_file(path)
        assert file.is_file(), path
        assert file.read_text().startswith("# SPDX-License-Identifier: Apache-2.0\n")


def test_a_file_is_edited_by_one_in_of_a_pull_request() -> None:
    for pull_request in SERIES:
        paths = [
            *(edits.path for edits in pull_request.edits),
            *pull_request.new_files,
        ]
        assert len(set(paths)) == len(paths)


def test_with_bases() -> None:
    assert with_bases(["qwen3_5_mtp"], SERIES) == {"deferred_vocab", "qwen3_5_mtp"}
    assert with_bases(["deferred_vocab"], SERIES) == {"deferred_vocab"}
    assert with_bases([], SERIES) == set()
    chain = [
        PullRequest("a", "", []),
        PullRequest("b", "", [], builds_on=["a"]),
        PullRequest("c", "", [], builds_on=["b"]),
    ]
    assert with_bases(["c"], chain) == {"a", "b", "c"}


# ------------------------------------------------------------------- on this vLLM


def test_all_apply(plan: Plan) -> None:
    assert plan.ids("applies") == IDS, plan.statuses
    assert [status.reason for status in plan.statuses] == [""] * len(IDS)
    assert set(plan.files) == {
        path
        for pull_request in SERIES
        for path in (
            *(edits.path for edits in pull_request.edits),
            *pull_request.new_files,
        )
    }
    for path, text in plan.files.items():
        compile(text, path, "exec")


@pytest.mark.parametrize("pull_request", SERIES, ids=IDS)
def test_every_changed_line_is_due_to_an_edit(
    pull_request: PullRequest, installed: Sources
) -> None:
    before = make_plan(installed, selected(*pull_request.builds_on)).files
    after = make_plan(installed, selected(pull_request.id)).files
    for path in pull_request.new_files:
        assert after[path] == repository_file(path).read_text()
    for edits in pull_request.edits:
        old = before.get(edits.path) or text_of(installed, edits.path)
        removed, added = changed_lines(old, after[edits.path])
        inserts = [e for e in edits.edits if isinstance(e, Insert)]
        replaces = [e for e in edits.edits if isinstance(e, Replace)]
        inserted = [
            line.strip() for e in inserts for line in e.code.strip().splitlines()
        ]
        # A replacement changes one line; everything else was inserted.
        assert len(removed) == len(replaces)
        rest = [line for line in added if line not in inserted]
        assert len(added) == len(inserted) + len(replaces)
        assert len(rest) == len(replaces)
        for edit in replaces:
            assert any(edit.new in line for line in rest)


def test_comments_of_vllm_survive(installed: Sources, plan: Plan) -> None:
    for path, text in plan.files.items():
        if (old := installed[path]) is not None:
            comments = [line for line in old.splitlines() if line.strip()[:1] == "#"]
            assert comments
            now = [line for line in text.splitlines() if line.strip()[:1] == "#"]
            assert now == comments


def test_the_result_is_recognised_as_upstream(installed: Sources, plan: Plan) -> None:
    again = make_plan({**installed, **plan.files}, SERIES)
    assert again.ids("upstream") == IDS, again.statuses
    assert not again.files


def test_the_rest_applies_where_the_first_is_upstream(
    installed: Sources, plan: Plan
) -> None:
    first = {path: text for path, text in plan.files.items() if path != MODEL}
    rest = make_plan({**installed, **first}, SERIES)
    assert [s.state for s in rest.statuses[:2]] == ["upstream", "applies"]
    assert rest.files == {MODEL: plan.files[MODEL]}


def test_only_deferred_vocab(installed: Sources, plan: Plan) -> None:
    only = make_plan(installed, selected("deferred_vocab"))
    assert only.ids("applies") == ["deferred_vocab"]
    assert set(only.files) == {DEFERRED_VOCAB, PROPOSER, V2_LOADER}
    assert all(plan.files[path] == text for path, text in only.files.items())


def test_the_check_encloses_the_sharing(plan: Plan) -> None:
    for path, function, share in (
        (PROPOSER, "load_model", "_maybe_share_lm_head"),
        (V2_LOADER, "load_eagle_model", "maybe_share_target_embed"),
    ):
        [definition] = [
            node
            for node in ast.walk(ast.parse(plan.files[path]))
            if isinstance(node, ast.FunctionDef) and node.name == function
        ]
        code = ast.unparse(definition)
        before, rest = code.split(f"{share}(", 1)
        assert before.count("deferred = deferred_modules(") == 1
        assert rest.count("check_attached(") == 1
        assert code.count("deferred_modules(") == code.count("check_attached(") == 1


# -------------------------------------------------------------------- on others


def test_qwen3_5_mtp_in_vllms_own_shape_is_upstream(installed: Sources) -> None:
    source = text_of(installed, MODEL)
    place = "        self.embed_tokens = VocabParallelEmbedding("
    assert source.count(place) == 1
    source = source.replace(place, f"        self.embed_tokens = None\n{place}")
    plan = make_plan({**installed, MODEL: source}, SERIES)
    assert plan.ids("upstream") == ["qwen3_5_mtp"]
    assert MODEL not in plan.files
    assert "deferred_vocab" in plan.ids("applies")


@pytest.mark.parametrize("path", [PROPOSER, V2_LOADER, MODEL])
def test_a_vllm_without_the_file(path: str, installed: Sources) -> None:
    check_conflict({**installed, path: None}, path, "no such file")


@pytest.mark.parametrize(
    ("path", "old", "new", "reason"),
    [
        (PROPOSER, "self.model = self._get_model()", "pass", "found 0"),
        (PROPOSER, "class SpecDecodeBaseProposer", "class Renamed", "found 0"),
        (V2_LOADER, "return eagle_model", "return", "found 0"),
        (V2_LOADER, "import", "imp ort", "can't be parsed"),
        (MODEL, "self.lm_head = ParallelLMHead(", "self.head = H(", "found 0"),
        (MODEL, '"embed_tokens", "lm_head"', '"lm_head"', "found 0"),
        (MODEL, "class Qwen3_5MultiTokenPredictor(", "class Other(", "found 0"),
        (MODEL, "get_pp_group", "pipeline_group", "not there: get_pp_group"),
    ],
)
def test_conflict(
    path: str, old: str, new: str, reason: str, installed: Sources
) -> None:
    source = text_of(installed, path)
    assert old in source
    check_conflict({**installed, path: source.replace(old, new)}, path, reason)


def test_a_file_that_cannot_be_parsed_is_a_conflict_of_its_own(
    installed: Sources,
) -> None:
    check_conflict({**installed, MODEL: "def f(:\n"}, MODEL, "can't be parsed")


def test_a_new_file_that_vllm_has_with_other_names(
    installed: Sources, plan: Plan
) -> None:
    # As if reviewers had renamed a function before they merged it.
    there = {**installed, **plan.files, MODEL: installed[MODEL]}
    there[DEFERRED_VOCAB] = text_of(there, DEFERRED_VOCAB).replace(
        "def draft_lm_head", "def head_for_draft"
    )
    base, mtp = make_plan(there, SERIES).statuses
    assert (base.state, mtp.state) == ("upstream", "conflict")
    assert f"{DEFERRED_VOCAB}: has no draft_lm_head" in mtp.reason


@pytest.mark.parametrize("path", [DEFERRED_VOCAB, PROPOSER, V2_LOADER])
def test_half_a_change_is_a_conflict(path: str, installed: Sources, plan: Plan) -> None:
    # All of it in one file, nothing in the others.
    check_conflict({**installed, path: plan.files[path]}, path, "there already")


def check_conflict(sources: Sources, path: str, reason: str) -> None:
    """Check that what edits the file is off as a whole, with what builds on it."""
    plan = make_plan(sources, SERIES)
    statuses = {status.id: status for status in plan.statuses}
    off = set()
    for pull_request in SERIES:
        status = statuses[pull_request.id]
        paths = {
            *(edits.path for edits in pull_request.edits),
            *pull_request.new_files,
        }
        if path in paths:
            assert status.state == "conflict"
            assert path in status.reason and reason in status.reason
            off.add(pull_request.id)
        elif bases := off & set(pull_request.builds_on):
            assert status.state == "conflict"
            assert f"builds on {min(bases)}" in status.reason
            off.add(pull_request.id)
        else:
            assert (status.state, status.reason) == ("applies", "")
    assert off
    # Whole or nothing: no file but those of the others.
    if on := [p for p in SERIES if p.id not in off]:
        assert plan.files == make_plan(sources, on).files
    else:
        assert not plan.files


def test_a_dependent_alone_is_a_conflict(installed: Sources) -> None:
    plan = make_plan(installed, [p for p in SERIES if p.id == "qwen3_5_mtp"])
    assert plan.ids("conflict") == ["qwen3_5_mtp"]
    assert "builds on deferred_vocab" in plan.statuses[0].reason
    assert not plan.files


def test_pull_requests_may_edit_the_same_file() -> None:
    first = PullRequest("a", "", [In("f.py", Insert("f", "y = 2", after="x = 1"))])
    second = PullRequest("b", "", [In("f.py", Insert("f", "z = 3", after="y = 2"))])
    third = PullRequest("c", "", [In("f.py", Insert("f", "z = 3", after="none()"))])
    plan = make_plan({"f.py": "def f():\n    x = 1\n"}, [first, second, third])
    assert plan.files == {"f.py": "def f():\n    x = 1\n    y = 2\n    z = 3\n"}
    assert [s.state for s in plan.statuses] == ["applies", "applies", "upstream"]
