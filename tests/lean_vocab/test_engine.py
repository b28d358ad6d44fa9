# SPDX-License-Identifier: Apache-2.0
"""The real engine, stock and patched: same tokens, same drafts, a lower peak.

The right output is known without running stock: the checkpoints count.
"""

import itertools
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.checkpoints import (
    CountingModel,
    write_deepseek_v3,
    write_eagle,
    write_eagle3,
    write_ernie4_5_moe,
    write_exaone_moe,
    write_glm4_moe,
    write_glm4_moe_lite,
    write_glm_ocr,
    write_qwen3_5,
    write_qwen3_next,
)
from benchmarks.engine import EngineRun, run_engine
from benchmarks.loading import largest
from benchmarks.logs import not_allocated_mib
from benchmarks.plugins import INT8_ROWS, change_config, quantize_table, write_plugin
from benchmarks.process import SWITCHES, Environment
from vllm_lean_vocab.estimate import estimate

pytestmark = pytest.mark.engine

STOCK, PATCHED = SWITCHES["stock"], SWITCHES["patched"]
ALONE = {"VLLM_LEAN_VOCAB": "draft_vocab"}  # and nothing for a class
FULL = pytest.mark.full
NUM_PROMPTS, MAX_TOKENS = 4, 16
# Every process takes long to import vLLM: what does not depend on them runs in one.
IS_ON = "vllm-lean-vocab: on with vLLM"
NOT_ALLOCATED = re.compile(r"MiB not allocated on this rank \((.*)\); the target's")


@pytest.fixture
def run(tmp_path: Path, warm_cache: Path) -> Any:
    """Run a model, and check what the log says of this package."""
    runs = itertools.count(1)

    def run_model(
        model: CountingModel,
        switch: Environment,
        one_process: bool = False,
        defers: bool = True,
        pythonpath: str | None = None,
        **options: Any,
    ) -> EngineRun:
        is_stock = switch is STOCK
        name = "stock" if is_stock else "patched"
        env = {**switch, "VLLM_CACHE_ROOT": str(warm_cache)}
        if pythonpath is not None:
            env["PYTHONPATH"] = pythonpath
        if one_process:
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        result = run_engine(
            model.path,
            prompts=model.prompts(NUM_PROMPTS),
            max_tokens=MAX_TOKENS,
            log=tmp_path / f"{next(runs)}-{name}.log",
            timeout=400,
            env=env,
            **options,
        )
        log = result.log.read_text()
        assert (IS_ON in log) != is_stock
        drafts = options.get("num_speculative_tokens") != 0
        assert bool(not_allocated_mib(result.log)) == (
            not is_stock and drafts and defers
        )
        return result

    return run_model


def together(
    run: Any, model: CountingModel, *switches: Environment, **options: Any
) -> list[EngineRun]:
    """Run a model in several engines at the same time."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda switch: run(model, switch, **options), switches))


def pair(run: Any, model: CountingModel, **options: Any) -> list[EngineRun]:
    """Run a model stock and patched."""
    return together(run, model, STOCK, PATCHED, **options)


def check_same(model: CountingModel, *runs: EngineRun) -> None:
    """Check the tokens against the known ones, and all counters with each other."""
    for result in runs:
        assert result.token_ids == model.continuations(NUM_PROMPTS, MAX_TOKENS)
        # The draft is right often, but not always: else equal counters say little.
        assert 0 < result.accepted_tokens < result.draft_tokens
    counters = {(r.drafts, r.draft_tokens, r.accepted_tokens) for r in runs}
    assert len(counters) == 1


def check_estimate(
    model: CountingModel,
    patched: EngineRun,
    method: str = "mtp",
    num_speculative_tokens: int = 1,
    tensor_parallel_size: int = 1,
    **_: Any,
) -> None:
    """Check what is said of a draft beforehand against each rank's log."""
    speculation: dict[str, Any] = {"method": method}
    speculation["num_speculative_tokens"] = num_speculative_tokens
    if model.draft is not None:
        speculation["model"] = str(model.draft)
    estimated = estimate(str(model.path), speculation, tensor_parallel_size)
    expected = {
        f"{table.name} {table.mib_per_rank:.1f} MiB"
        for table in estimated.tables
        if table.deferred
    }
    logged = NOT_ALLOCATED.findall(patched.log.read_text())
    assert len(logged) == (tensor_parallel_size if expected else 0)
    assert all(set(tables.split(", ")) == expected for tables in logged)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_loading_peak(tmp_path: Path, run: Any, tied: bool) -> None:
    """What stays above the level before is what the draft really owns."""
    vocab_size = 65_536 if tied else 248_320
    model = write_qwen3_5(tmp_path / "model", vocab_size=vocab_size, tied=tied)
    stock, patched = (
        run(model, switch, one_process=tied) for switch in (STOCK, PATCHED)
    )
    check_same(model, stock, patched)

    before, after = largest(stock.loading), largest(patched.loading)
    # Of a tied head nothing was ever filled, so resident memory does not show it.
    filled = model.table_bytes * (1 if tied else 2)
    assert before.peak_above - after.peak_above >= 0.98 * filled
    assert after.after == pytest.approx(before.after, rel=0.01)
    [mib] = not_allocated_mib(patched.log)
    assert mib == pytest.approx(2 * model.table_bytes / 2**20, abs=0.1)
    check_estimate(model, patched)


@pytest.mark.parametrize("switch", [PATCHED, pytest.param(ALONE, marks=FULL)])
def test_tables_in_shards_of_their_own_are_not_read(
    tmp_path: Path, run: Any, switch: Environment
) -> None:
    model = write_qwen3_5(tmp_path / "model", vocab_size=32_768, shards="tables")
    stock, patched = together(run, model, STOCK, switch, one_process=True)
    check_same(model, stock, patched)
    # Where vLLM's progress bars begin: shards of the target, then of the draft.
    read = re.compile(r" 0% Completed \| 0/(\d+) ")
    assert read.findall(stock.log.read_text()) == ["3", "3"]
    assert read.findall(patched.log.read_text()) == ["3", "1"]


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [{"moe": True}, {"layout": "multimodal"}],
    ids=["moe", "multimodal"],
)
def test_variants(tmp_path: Path, run: Any, options: dict[str, Any]) -> None:
    model = write_qwen3_5(tmp_path / "model", vocab_size=32_768, **options)
    check_same(model, *pair(run, model, one_process=True))


@pytest.mark.parametrize(
    ("write", "layers"),
    [
        (write_glm4_moe_lite, 2),
        pytest.param(write_glm4_moe, 1, marks=FULL),
        pytest.param(write_glm4_moe, 2, marks=FULL),
        pytest.param(write_glm4_moe_lite, 1, marks=FULL),
        pytest.param(write_glm_ocr, 1, marks=FULL),
    ],
)
def test_glm(tmp_path: Path, run: Any, write: Any, layers: int) -> None:
    """Like official checkpoints these hold copies of the tables in each MTP layer."""
    model = write(
        tmp_path / "model",
        vocab_size=32_768,
        hidden_size=256,
        num_nextn_predict_layers=layers,
    )
    stock, patched = pair(run, model, one_process=True, num_speculative_tokens=layers)
    check_same(model, stock, patched)
    # An embedding, and a head in every MTP layer.
    [mib] = not_allocated_mib(patched.log)
    tables = 1 + layers
    assert mib == pytest.approx(tables * model.table_bytes / 2**20, abs=0.1)
    check_estimate(model, patched, num_speculative_tokens=layers)


TWO_LAYERS, TWO_TOKENS = {"num_nextn_predict_layers": 2}, {"num_speculative_tokens": 2}
TWO_RANKS = {"tensor_parallel_size": 2}
EAGLE, EAGLE3 = {"method": "eagle"}, {"method": "eagle3"}
KEPT = {"embed_tokens": "own", "lm_head": "own"}
LESS_VOCABULARY = {**KEPT, "embed_tokens": "none", "draft_vocab_size": 24_576}


@pytest.mark.parametrize(
    ("write", "options", "engine", "tables"),
    [
        (write_deepseek_v3, {}, {}, 2),
        pytest.param(write_deepseek_v3, TWO_LAYERS, TWO_TOKENS, 3, marks=FULL),
        pytest.param(write_deepseek_v3, {}, TWO_RANKS, 2, marks=FULL),
        pytest.param(write_qwen3_next, {}, {}, 2, marks=FULL),
        pytest.param(write_ernie4_5_moe, {}, {}, 2, marks=FULL),
        pytest.param(write_ernie4_5_moe, {"tied": True}, {}, 2, marks=FULL),
        pytest.param(write_exaone_moe, {}, {}, 2, marks=FULL),
        pytest.param(write_exaone_moe, {"tied": True}, {}, 2, marks=FULL),
        pytest.param(write_glm4_moe, {}, {}, 2, marks=FULL),
        pytest.param(write_glm4_moe_lite, TWO_LAYERS, TWO_TOKENS, 3, marks=FULL),
        pytest.param(write_eagle, {}, EAGLE, 1, marks=FULL),
        pytest.param(write_eagle, {"embed_tokens": "own"}, EAGLE, 0, marks=FULL),
        pytest.param(write_eagle, {"embed_tokens": "copy"}, EAGLE, 0, marks=FULL),
        pytest.param(write_eagle3, {"lm_head": "none"}, EAGLE3, 2, marks=FULL),
        pytest.param(write_eagle3, KEPT, EAGLE3, 0, marks=FULL),
        pytest.param(write_eagle3, LESS_VOCABULARY, EAGLE3, 1, marks=FULL),
        pytest.param(
            write_eagle3, LESS_VOCABULARY, {**EAGLE3, **TWO_RANKS}, 1, marks=FULL
        ),
    ],
)
def test_every_draft(
    tmp_path: Path,
    run: Any,
    write: Any,
    options: dict[str, Any],
    engine: dict[str, Any],
    tables: int,
) -> None:
    """The change for all drafts, alone: tables that a draft keeps are as on stock."""
    model = write(tmp_path / "model", vocab_size=32_768, hidden_size=256, **options)
    ranks = engine.get("tensor_parallel_size", 1)
    engine = {"one_process": ranks == 1, "draft": model.draft, **engine}
    runs = [
        run(model, switch, defers=tables > 0, **engine) for switch in (STOCK, ALONE)
    ]
    check_same(model, *runs)
    mib = sum(not_allocated_mib(runs[1].log))
    assert mib == pytest.approx(tables * model.table_bytes / 2**20, abs=0.1 * ranks)
    check_estimate(model, runs[1], **engine)


@pytest.mark.parametrize(
    ("targets", "ignored"),
    [
        ([], []),
        pytest.param([], ["model.embed_tokens"], marks=FULL),
        pytest.param([], ["re:.*embed_tokens"], marks=FULL),
        # The table is not quantized all the same.
        pytest.param(["re:.*embed_tokens"], [], marks=FULL),
    ],
)
def test_quantized_target(
    tmp_path: Path, run: Any, targets: list[str], ignored: list[str]
) -> None:
    """Spawned processes unpickle its config, and import layers, before plugins."""
    model = write_qwen3_5(tmp_path / "model", vocab_size=32_768, quantization="w8a8")
    config = json.loads((model.path / "config.json").read_text())["quantization_config"]
    config["config_groups"]["group_0"]["targets"] += targets
    config["ignore"] += ignored
    change_config(model.path, quantization_config=config)
    # With the change for all drafts, functions of the layers get new code.
    switches = [PATCHED] if targets or ignored else [PATCHED, ALONE]
    with ThreadPoolExecutor() as pool:
        # Else vLLM doesn't check that a quantized model is loaded completely.
        tracked = {"enable_weights_track": True}
        stock = pool.submit(run, model, STOCK, model_loader_extra_config=tracked)
        patched = pool.map(lambda switch: run(model, switch), switches)
        check_same(model, stock.result(), *patched)


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "text"},
        pytest.param({"layout": "multimodal"}, marks=FULL),
        pytest.param({"num_speculative_tokens": 0}, marks=FULL),
        pytest.param({"tensor_parallel_size": 2}, marks=FULL),
    ],
    ids=["text", "multimodal", "no draft", "tensor parallel"],
)
def test_quantized_table(tmp_path: Path, run: Any, options: dict[str, Any]) -> None:
    """An int8 table, patched, gives what its rows give in bfloat16 on stock."""
    layout = options.pop("layout", "text")
    bfloat16, int8 = (
        write_qwen3_5(tmp_path / name, vocab_size=32_768, layout=layout)
        for name in ("bfloat16", "int8")
    )
    quantize_table(bfloat16.path, keep_int8=False)
    quantize_table(int8.path)
    pythonpath = write_plugin(tmp_path / "site", "int8_rows", INT8_ROWS.read_text())
    options["one_process"] = "tensor_parallel_size" not in options
    stock = run(bfloat16, STOCK, **options)
    patched = run(int8, PATCHED, pythonpath=pythonpath, **options)
    if options.get("num_speculative_tokens") == 0:
        assert patched.token_ids == stock.token_ids
        return
    check_same(int8, stock, patched)
    # The draft uses the target's table as it is: int8 rows, and their scales.
    ranks = options.get("tensor_parallel_size", 1)
    mib = int8.table_bytes / 2**20 / ranks
    table = mib / 2 + int8.vocab_size * 2 / 2**20 / ranks
    log = patched.log.read_text()
    assert log.count(f"embed_tokens {table:.1f} MiB, lm_head {mib:.1f} MiB") == ranks


@pytest.mark.full
def test_dummy_weights(tmp_path: Path, run: Any) -> None:
    """They don't count, but are the same in every run."""
    model = write_qwen3_5(tmp_path / "model", vocab_size=32_768)
    stock, patched = pair(run, model, one_process=True, load_format="dummy")
    assert patched.token_ids == stock.token_ids
    assert (patched.drafts, patched.accepted_tokens) == (
        stock.drafts,
        stock.accepted_tokens,
    )


def write_adapter(path: Path, model: CountingModel) -> Path:
    """Write a LoRA adapter that changes what the target's attention gives."""
    name = r"model\.layers\.\d+\.self_attn\.o_proj"
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for key, weight in load_file(model.path / "model.safetensors").items():
        if re.fullmatch(rf"{name}\.weight", key):
            rows, columns = weight.shape
            for part, shape in {"A": (8, columns), "B": (rows, 8)}.items():
                factor = torch.randn(shape, generator=generator)
                module = key.removesuffix(".weight")
                tensors[f"base_model.model.{module}.lora_{part}.weight"] = factor
    path.mkdir()
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 64}
    config["target_modules"] = ["o_proj"]
    (path / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, path / "adapter_model.safetensors")
    return path


@pytest.mark.full
@pytest.mark.parametrize(
    ("write", "speculation"), [(write_qwen3_5, {}), (write_eagle, EAGLE)]
)
def test_lora(
    tmp_path: Path, run: Any, write: Any, speculation: dict[str, Any]
) -> None:
    """An adapter of the target: vLLM wraps modules of it before the draft loads.

    On a CPU it has no such wrapper for mixtures of experts.
    """
    model = write(tmp_path / "model", vocab_size=32_768, hidden_size=256)
    lora = write_adapter(tmp_path / "lora", model)
    options: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8}
    options |= {"one_process": True, "draft": model.draft, **speculation}
    check_same(model, *pair(run, model, **options))
    stock, patched = pair(run, model, lora=lora, **options)
    # It does something, and the same.
    assert stock.token_ids != model.continuations(NUM_PROMPTS, MAX_TOKENS)
    assert patched.token_ids == stock.token_ids
    assert patched.accepted_tokens == stock.accepted_tokens


def test_tensor_parallel(tmp_path: Path, run: Any) -> None:
    model = write_qwen3_5(tmp_path / "model", vocab_size=32_768)
    stock, patched = (
        run(model, switch, tensor_parallel_size=2) for switch in (STOCK, PATCHED)
    )
    check_same(model, stock, patched)
    # Half of both tables, on each of the two ranks.
    assert not_allocated_mib(patched.log) == [model.table_bytes / 2**20] * 2
    check_estimate(model, patched, tensor_parallel_size=2)


@pytest.mark.parametrize(
    "switches",
    [[STOCK, PATCHED], pytest.param([PATCHED, ALONE, STOCK], marks=FULL)],
    ids=["stock first", "stock last"],
)
def test_compiled(tmp_path: Path, run: Any, switches: list[Environment]) -> None:
    """Neither stock nor patched code may use what the other left in the cache."""
    model = write_qwen3_5(tmp_path / "model", vocab_size=32_768)
    runs = [run(model, s, one_process=True, enforce_eager=False) for s in switches]
    check_same(model, *runs)
