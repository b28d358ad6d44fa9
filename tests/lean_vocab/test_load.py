# SPDX-License-Identifier: Apache-2.0
"""Draft loading with vLLM's own loaders, at the level of allocations.

For what the engine can't run on a CPU: the V2 loader, pipeline parallelism, and models
whose attention has no kernels there.
"""

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.checkpoints import (
    write_glm4_moe,
    write_glm4_moe_lite,
    write_glm5next,
    write_glm_ocr,
    write_qwen3_5,
)
from benchmarks.plugins import INT8_ROWS, change_config, quantize_table, write_plugin

LOAD_DRAFT = Path(__file__).with_name("load_draft.py")
VOCAB_SIZE, HIDDEN_SIZE = 32_768, 256
TABLE_BYTES = VOCAB_SIZE * HIDDEN_SIZE * 2


class Model(NamedTuple):
    """A checkpoint, and what a CPU lacks for it.

    Attributes:
        write: Writes it.
        options: Arguments of `write`, beside path and sizes.
        lacking: Options of `load_draft.py`.
        edit: Changes it.

    """

    write: Callable[..., Any]
    options: dict[str, Any] = {}
    lacking: dict[str, Any] = {}
    edit: Callable[[Path], None] | None = None


def name_nvfp4(path: Path) -> None:
    """Say that linear layers are NVFP4, except all that are there by name.

    A checkpoint's LM head is called `lm_head`, a draft's own `model.layers.N.head`.
    """
    quantization = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "ignore": ["*.self_attn.*", "*.mlp.*", "lm_head"],
    }
    change_config(path, quantization_config=quantization)


MODELS = {
    "qwen3_5": Model(write_qwen3_5),
    "qwen3_5 tied": Model(write_qwen3_5, {"tied": True}),
    "qwen3_5 moe": Model(write_qwen3_5, {"moe": True}),
    "qwen3_5 multimodal": Model(write_qwen3_5, {"layout": "multimodal"}),
    "glm4_moe": Model(write_glm4_moe, {"num_nextn_predict_layers": 2}),
    "glm4_moe_lite": Model(write_glm4_moe_lite, {"num_nextn_predict_layers": 2}),
    "glm_ocr": Model(write_glm_ocr),
    "glm5next": Model(
        write_glm5next,
        {"mtp_tables": False, "layout": "text"},
        {"sparse_attention": True},
    ),
    "glm5next multimodal": Model(
        write_glm5next,
        {"mtp_tables": False, "layout": "multimodal"},
        {"sparse_attention": True},
    ),
    "glm5next with tables": Model(
        write_glm5next, {"layout": "text"}, {"sparse_attention": True}
    ),
    "nvfp4": Model(
        write_glm4_moe_lite, {"mtp_tables": False}, {"nvfp4_kernel": True}, name_nvfp4
    ),
    "int8 table": Model(write_qwen3_5, edit=quantize_table),
    "int8 table multimodal": Model(
        write_qwen3_5, {"layout": "multimodal"}, edit=quantize_table
    ),
    "int8 table tied": Model(write_qwen3_5, {"tied": True}, edit=quantize_table),
}
# What loads on stock as well. The engine runs the other loader, where it can.
CASES = [
    ("qwen3_5", "legacy"),
    ("qwen3_5", "v2"),
    ("qwen3_5 tied", "v2"),
    ("qwen3_5 moe", "v2"),
    ("qwen3_5 multimodal", "v2"),
    ("glm4_moe", "v2"),
    ("glm4_moe_lite", "v2"),
    ("glm_ocr", "legacy"),
    ("glm_ocr", "v2"),
    ("glm5next", "legacy"),
    ("glm5next multimodal", "v2"),
]
# What doesn't, and the error.
FAILING_ON_STOCK = {
    "glm5next with tables": "KeyError: 'model.layers.1.shared_head.head.weight'",
    "nvfp4": "RuntimeError: NVFP4 weight_scale for layer 'parallel_lm_head' was never "
    "loaded (still NaN)",
}
FAILING_CASES = [
    (model, proposer) for model in FAILING_ON_STOCK for proposer in ("legacy", "v2")
]
INT8_CASES = [("int8 table", "v2"), ("int8 table multimodal", "v2")]
TIED_CASE = ("int8 table tied", "v2")
INT8_BYTES = VOCAB_SIZE * HIDDEN_SIZE + VOCAB_SIZE * 2  # rows, and their scales
TWO_STAGES = ["qwen3_5", "qwen3_5 tied", "glm4_moe"]
# With the change for all drafts, and none of those for a class: what each of these is
# about is left to the target, too.
ALONE = "draft_vocab"
ALONE_CASES = [
    *CASES,
    ("nvfp4", "legacy"),
    ("nvfp4", "v2"),
]
Reports = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write all checkpoints."""
    root = tmp_path_factory.mktemp("models")
    paths = {name: root / name.replace(" ", "-") for name in MODELS}
    for name, model in MODELS.items():
        model.write(
            paths[name],
            vocab_size=VOCAB_SIZE,
            hidden_size=HIDDEN_SIZE,
            **model.options,
        )
        if model.edit is not None:
            model.edit(paths[name])
    return paths


def load_all(
    switch: str,
    cases: Sequence[tuple[str, str]],
    paths: Mapping[str, Path],
    cache: Path,
    stages: int = 1,
) -> Reports:
    """Load drafts in processes of their own; return what the last stage reports."""
    jobs = [
        {
            "model": str(paths[name]),
            "proposer": proposer,
            "num_speculative_tokens": MODELS[name].options.get(
                "num_nextn_predict_layers", 1
            ),
            **MODELS[name].lacking,
        }
        for name, proposer in cases
    ]
    options = {
        "jobs": jobs,
        "pipeline_parallel_size": stages,
        "rendezvous": f"file://{cache}/rendezvous-{uuid.uuid4().hex}",
    }
    env = {
        **os.environ,
        "VLLM_LEAN_VOCAB": switch,
        "PYTHONPATH": write_plugin(
            cache / uuid.uuid4().hex, "int8_rows", INT8_ROWS.read_text()
        ),
        "VLLM_CACHE_ROOT": str(cache),
        # Names shared memory: of this run alone, also if an earlier one was killed.
        "VLLM_DIST_IDENT": uuid.uuid4().hex,
        "HF_HUB_OFFLINE": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", LOAD_DRAFT, json.dumps({**options, "rank": rank})],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(stages)
    ]
    try:
        outputs = [process.communicate(timeout=500)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-3000:]
    reports = json.loads(outputs[-1].splitlines()[-1])
    return dict(zip(cases, reports, strict=True))


def load_both(*args: Any) -> tuple[Reports, Reports]:
    """Load stock and patched, at the same time."""
    with ThreadPoolExecutor() as pool:
        stock, patched = pool.map(lambda switch: load_all(switch, *args), ("0", "1"))
    return stock, patched


@pytest.fixture(scope="module")
def loaded(paths: dict[str, Path], warm_cache: Path) -> tuple[Reports, Reports]:
    """What became of each draft, stock and patched."""
    cases = [*CASES, *FAILING_CASES, *INT8_CASES, TIED_CASE]
    return load_both(cases, paths, warm_cache)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_no_vocabulary_storage_at_any_moment(
    loaded: tuple[Reports, Reports], case: tuple[str, str]
) -> None:
    stock, patched = (reports[case] for reports in loaded)
    assert "error" not in stock
    # The recorder sees a table where there is one.
    assert stock["built"]["largest"] >= TABLE_BYTES
    check_deferred(patched, case[0])
    assert {m["nbytes"] for m in patched["final"].values()} == {TABLE_BYTES}
    assert patched["draft"] == stock["draft"]
    assert patched["final"] == stock["final"]


@pytest.mark.parametrize("case", FAILING_CASES, ids="-".join)
def test_what_fails_on_stock_loads(
    loaded: tuple[Reports, Reports], case: tuple[str, str]
) -> None:
    stock, patched = (reports[case] for reports in loaded)
    assert stock["error"].startswith(FAILING_ON_STOCK[case[0]])
    check_deferred(patched, case[0])


@pytest.mark.parametrize("case", INT8_CASES, ids="-".join)
def test_int8_table(loaded: tuple[Reports, Reports], case: tuple[str, str]) -> None:
    """It stays int8 in the target, and is what the draft is given."""
    stock, patched = (reports[case] for reports in loaded)
    assert "embed_tokens.weight_scale" in stock["error"]
    check_deferred(patched, case[0])
    assert patched["final"]["embed_tokens"]["nbytes"] == INT8_BYTES
    assert patched["final"]["embed_tokens"]["dtypes"] == ["bfloat16", "int8"]
    bfloat16 = loaded[0]["qwen3_5", "v2"]["final"]["embed_tokens"]
    assert (bfloat16["nbytes"], bfloat16["dtypes"]) == (TABLE_BYTES, ["bfloat16"])


def test_a_head_tied_to_an_int8_table_is_refused(
    loaded: tuple[Reports, Reports],
) -> None:
    stock, patched = (reports[TIED_CASE] for reports in loaded)
    assert "embed_tokens.weight_scale" in stock["error"]
    assert patched["error"].startswith(
        "ValueError: lm_head is tied to model.embed_tokens, but "
        "UnquantizedEmbeddingMethod can't use its quantized table (Int8Rows)"
    )


@pytest.fixture(scope="module")
def loaded_alone(paths: dict[str, Path], warm_cache: Path) -> Reports:
    return load_all(ALONE, ALONE_CASES, paths, warm_cache)


@pytest.mark.parametrize("case", ALONE_CASES, ids="-".join)
def test_the_change_for_all_drafts_alone(
    loaded: tuple[Reports, Reports], loaded_alone: Reports, case: tuple[str, str]
) -> None:
    stock, alone = loaded[0][case], loaded_alone[case]
    # A head that vLLM leaves out itself, it doesn't give a placeholder.
    check_deferred(alone, case[0], heads_left_out="glm5next" in case[0])
    if "error" not in stock:
        assert (alone["draft"], alone["final"]) == (stock["draft"], stock["final"])


def check_deferred(
    report: dict[str, Any], name: str, heads_left_out: bool = False
) -> None:
    """Check that all tables were left out, and the target's attached and logged."""
    assert "error" not in report
    assert 0 < report["built"]["largest"] < TABLE_BYTES / 10
    modules = report["built"]["modules"]
    assert len(modules) == 1 + MODELS[name].options.get("num_nextn_predict_layers", 1)
    assert {module["nbytes"] for module in modules.values()} == {0}
    assert set(report["attached"]) == set(modules)
    assert all(report["attached"].values())
    [line] = [text for text in report["log"] if "not allocated on this rank" in text]
    # Of a head that a quantization leaves out, vLLM keeps only a packed copy on a CPU.
    sizes = [
        module["nbytes"] / 2**20
        for table, module in report["final"].items()
        if table == "embed_tokens" or not heads_left_out
    ]
    assert f"{sum(sizes):.1f} MiB not allocated" in line
    for mib in sizes:
        assert line.partition("(")[2].count(f" {mib:.1f} MiB") == sizes.count(mib)


def test_two_pipeline_stages_load_as_on_stock(
    paths: dict[str, Path], warm_cache: Path
) -> None:
    cases = [(name, "legacy") for name in TWO_STAGES]
    int8 = ("int8 table multimodal", "legacy")
    stock, patched = load_both([*cases, int8], paths, warm_cache, 2)
    alone = load_all(ALONE, cases, paths, warm_cache, 2)
    for case in cases:
        for part in ("built", "attached", "final"):
            assert alone[case][part] == stock[case][part]
        modules = patched[case]["built"]["modules"]
        for module in modules.values():
            assert module["nbytes"] == TABLE_BYTES
        assert modules["embed_tokens"]["checksum"] != 0
        for part in ("built", "attached", "final"):
            assert patched[case][part] == stock[case][part]

    # Its stage has a table of its own, in the format of the target's.
    assert "embed_tokens.weight_scale" in stock[int8]["error"]
    own = patched[int8]["built"]["modules"]["embed_tokens"]
    assert own["nbytes"] == INT8_BYTES and own["checksum"] != 0
