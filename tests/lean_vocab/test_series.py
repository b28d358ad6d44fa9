# SPDX-License-Identifier: Apache-2.0
"""The pull requests, on the vLLM that is installed."""

import ast
import importlib.util
from collections import Counter
from collections.abc import Mapping

import pytest

from vllm_lean_vocab.edits import (
    AddArguments,
    Enclose,
    In,
    Insert,
    PullRequest,
    Remove,
    Replace,
    Variant,
)
from vllm_lean_vocab.importer import module_name
from vllm_lean_vocab.plan import Plan, Status, make_plan, repository_file, with_bases
from vllm_lean_vocab.series import SERIES

from .installed import served_modules, sources

IDS = [pull_request.id for pull_request in SERIES]
MODEL = "vllm/model_executor/models/qwen3_5_mtp.py"
DEEPSEEK_MTP = "vllm/model_executor/models/deepseek_mtp.py"
GLM5NEXT_MTP = "vllm/models/glm5next/common/mtp.py"
DEFERRED_VOCAB = "vllm/model_executor/models/deferred_vocab.py"
PROPOSER = "vllm/v1/spec_decode/llm_base_proposer.py"
V2_LOADER = "vllm/v1/worker/gpu/spec_decode/eagle/utils.py"
WORKER = "vllm/v1/worker/worker_base.py"

NONE = Variant("", [])

Sources = dict[str, str | None]


@pytest.fixture(scope="module")
def installed() -> Sources:
    """Return the text of vLLM's own files, as they are installed."""
    return sources()


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


def changed_lines(old: str, new: str) -> tuple[Counter[str], Counter[str]]:
    """Return the lines taken out and those put in."""
    before, after = (
        Counter(line.strip() for line in text.splitlines()) for text in (old, new)
    )
    return before - after, after - before


# ------------------------------------------------------------------------- entries


def test_ids_are_the_names_of_the_modules() -> None:
    assert len(set(IDS)) == len(IDS)
    for pull_request in SERIES:
        spec = importlib.util.find_spec(f"vllm_lean_vocab.series.{pull_request.id}")
        assert spec is not None


def test_pull_requests_build_on_earlier_ones() -> None:
    for number, pull_request in enumerate(SERIES):
        assert set(pull_request.builds_on) <= set(IDS[:number])
        imports = [
            edit.code
            for edits in (pull_request.edits, *(v.edits for v in pull_request.variants))
            for each in edits
            for edit in each.edits
            if isinstance(edit, Insert) and not edit.where
        ]
        if any("deferred_vocab" in code for code in imports):
            assert "deferred_vocab" in {pull_request.id, *pull_request.builds_on}


@pytest.mark.parametrize("pull_request", SERIES, ids=IDS)
def test_files_of_the_repository_exist(pull_request: PullRequest) -> None:
    assert pull_request.title and pull_request.tests
    for path in (*pull_request.new_files, *pull_request.tests):
        file = repository_file(path)
        assert file.is_file(), path
        assert file.read_text().startswith("# SPDX-License-Identifier: Apache-2.0\n")


def test_a_file_is_edited_by_one_in_of_a_pull_request() -> None:
    for pull_request in SERIES:
        for more in (variant.edits for variant in pull_request.variants or [NONE]):
            edits = [*pull_request.edits, *more]
            paths = [*(each.path for each in edits), *pull_request.new_files]
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
    assert {module_name(path) for path in plan.files} == served_modules()
    for path, text in plan.files.items():
        compile(text, path, "exec")


@pytest.mark.parametrize("pull_request", SERIES, ids=IDS)
def test_every_changed_line_is_due_to_an_edit(
    pull_request: PullRequest, installed: Sources, plan: Plan
) -> None:
    before = make_plan(installed, selected(*pull_request.builds_on)).files
    after = make_plan(installed, selected(pull_request.id)).files
    for path in pull_request.new_files:
        assert after[path] == repository_file(path).read_text()
    [status] = [s for s in plan.statuses if s.id == pull_request.id]
    variants = [v for v in pull_request.variants if v.vllm == status.variant]
    assert len(variants) == min(len(pull_request.variants), 1)
    for edits in (*pull_request.edits, *(e for v in variants for e in v.edits)):
        old = before.get(edits.path) or text_of(installed, edits.path)
        removed, added = changed_lines(old, after[edits.path])
        inserts = [e for e in edits.edits if isinstance(e, Insert)]
        replaces = [e for e in edits.edits if isinstance(e, Replace)]
        removes = [e for e in edits.edits if isinstance(e, Remove)]
        added_to = [e for e in edits.edits if isinstance(e, AddArguments)]
        enclosing = [e for e in edits.edits if isinstance(e, Enclose)]

        removed.subtract(line for e in removes for line in lines_of(old, e.where))
        assert not -removed  # all of it is gone
        for line in +removed:
            assert not line or any(
                line in code or code in line
                for code in (
                    *(code for edit in replaces for code in (edit.within, edit.old)),
                    *(edit.call for edit in added_to),
                    *("with " for _ in enclosing),  # it takes one more
                )
            )
        added.subtract(
            line.strip() for e in inserts for line in e.code.strip().splitlines()
        )
        new = [e.new for e in replaces]
        new += [e.code for e in (*added_to, *enclosing)]
        assert added.total() == len(new) and not -added
        for code in new:
            assert any(code in line for line in added)


def lines_of(source: str, definition: str) -> list[str]:
    """Return the lines of a class or function at the top level."""
    [node] = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == definition
    ]
    segment = ast.get_source_segment(source, node)
    assert segment is not None
    return [line.strip() for line in segment.splitlines()]


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
    first = make_plan(installed, SERIES[:1]).files
    rest = make_plan({**installed, **first}, SERIES)
    assert rest.ids("upstream") == IDS[:1] and rest.ids("applies") == IDS[1:]
    assert {**first, **rest.files} == plan.files


def test_only_deferred_vocab(installed: Sources) -> None:
    only = make_plan(installed, selected("deferred_vocab"))
    assert only.ids("applies") == ["deferred_vocab"]
    assert set(only.files) == {DEFERRED_VOCAB, PROPOSER, V2_LOADER, WORKER}
    others = [p for p in SERIES if p.id != "draft_vocab"]  # it edits the same files
    files = make_plan(installed, others).files
    assert all(files[path] == text for path, text in only.files.items())


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
    assert "draft_embedding" not in plan.files[MODEL]
    assert plan.ids("applies") == [id for id in IDS if id != "qwen3_5_mtp"]


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
    base, mtp, *_ = make_plan(there, SERIES).statuses
    assert (base.state, mtp.state) == ("upstream", "conflict")
    assert f"{DEFERRED_VOCAB}: has no draft_lm_head" in mtp.reason


def test_a_new_file_that_imports_what_vllm_has_with_other_names(
    installed: Sources,
) -> None:
    base = make_plan(installed, selected("deferred_vocab")).files
    there = {**installed, **base}
    there[DEFERRED_VOCAB] = text_of(there, DEFERRED_VOCAB).replace(
        "class UnattachedMethod", "class NoMethod"
    )
    statuses = {status.id: status for status in make_plan(there, SERIES).statuses}
    assert statuses["deferred_vocab"].state == "upstream"
    reason = statuses["draft_vocab"].reason
    assert f"{DEFERRED_VOCAB}: has no UnattachedMethod" in reason


@pytest.mark.parametrize("path", [DEFERRED_VOCAB, PROPOSER, V2_LOADER])
def test_half_a_change_is_a_conflict(path: str, installed: Sources, plan: Plan) -> None:
    # All of it in one file, nothing in the others.
    check_conflict({**installed, path: plan.files[path]}, path, "there already")


def check_conflict(sources: Sources, path: str, reason: str) -> None:
    """Check that what the file no longer fits is off, with what builds on it."""
    plan = make_plan(sources, SERIES)
    statuses = {status.id: status for status in plan.statuses}
    off = set()
    for pull_request in SERIES:
        status = statuses[pull_request.id]
        if bases := off & set(pull_request.builds_on):
            assert status.state == "conflict"
            assert f"builds on {min(bases)}" in status.reason
        elif status.state == "conflict":
            assert path in (*pull_request.edited_paths, *pull_request.new_files)
            assert path in status.reason and reason in status.reason
        else:
            assert (status.state, status.reason) == ("applies", "")
            continue
        off.add(pull_request.id)
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


# ----------------------------------------------------------------------- variants

OLD, NEW = "def f():\n    x = 1\n", "def f():\n    x = 2\n"


def with_variants(*more: Variant) -> PullRequest:
    """Return a pull request for two states of a file, and any more."""
    return PullRequest(
        "a",
        "",
        [In("base.py", Insert("g", "y = 1", before="return y"))],
        variants=[
            Variant("x is 1", [In("f.py", Replace("f", "x = 1", "1", "one"))]),
            Variant("x is 2", [In("f.py", Replace("f", "x = 2", "2", "two"))]),
            *more,
        ],
    )


def sources_with(f: str | None) -> Sources:
    return {"base.py": "def g():\n    return y\n", "f.py": f}


@pytest.mark.parametrize(
    ("source", "variant"),
    [(OLD, "x is 1"), (NEW, "x is 2")],
)
def test_the_variant_that_fits_is_applied(source: str, variant: str) -> None:
    defined = f"one = two = 0\n\n{source}"
    plan = make_plan(sources_with(defined), [with_variants()])
    assert plan.statuses == (Status("a", "applies", variant=variant),)
    word = {"x is 1": "x = one", "x is 2": "x = two"}[variant]
    assert word in plan.files["f.py"] and "y = 1" in plan.files["base.py"]

    again = make_plan(plan.files, [with_variants()])
    assert again.statuses == (Status("a", "upstream"),)
    # The rest of the change alone is no whole one.
    half = sources_with(plan.files["f.py"])
    assert make_plan(half, [with_variants()]).ids("conflict") == ["a"]


def test_no_variant_fits() -> None:
    plan = make_plan(sources_with("def f():\n    x = 3\n"), [with_variants()])
    [status] = plan.statuses
    assert (status.state, status.variant) == ("conflict", "")
    for variant in ("x is 1", "x is 2"):
        assert f"[{variant}] f.py: f: expected one match" in status.reason
    assert not plan.files
    [status] = make_plan(sources_with(None), [with_variants()]).statuses
    assert status.reason.count("f.py: this vLLM has no such file") == 2


def test_several_variants_fit() -> None:
    other = Variant("x is", [In("f.py", Insert("f", "z = 1", after="x = 1"))])
    source = f"one = 0\n\n{OLD}"
    plan = make_plan(sources_with(source), [with_variants(other)])
    [status] = plan.statuses
    assert status.state == "conflict" and not plan.files
    assert "in several states: x is 1, x is" in status.reason


def test_glm_mtp_tells_the_state_of_vllm(installed: Sources, plan: Plan) -> None:
    """Here one head is left out; 0.30 allocates all, and has a file elsewhere."""
    [status] = [s for s in plan.statuses if s.id == "glm_mtp"]
    assert "(head = None)" in status.variant

    path = GLM5NEXT_MTP.replace("common", "nvidia")
    earlier = {
        **installed,
        DEEPSEEK_MTP: replaced(
            text_of(installed, DEEPSEEK_MTP),
            ("        *,\n        defer_lm_head: bool = False,\n", ""),
            ("        if defer_lm_head:\n            self.head = None\n", ""),
            (
                "        else:\n            self.head",
                "        if True:\n            self.head",
            ),
        ),
        GLM5NEXT_MTP: None,
        path: replaced(
            text_of(installed, GLM5NEXT_MTP),
            ("defer_lm_head=True", "quant_config=quant_config"),
            ("self.shared_head =", "quant_config = None\n        self.shared_head ="),
        ),
    }
    made = make_plan(earlier, SERIES)
    [status] = [s for s in made.statuses if s.id == "glm_mtp"]
    assert (status.state, status.variant) == ("applies", "vLLM allocates every head")
    assert "defer_lm_head: bool" in made.files[DEEPSEEK_MTP]
    assert "defer_lm_head=defers_vocab(" in made.files[path]
    assert make_plan({**earlier, **made.files}, SERIES).ids("upstream") == IDS


def replaced(text: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text
