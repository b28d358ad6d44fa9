# SPDX-License-Identifier: Apache-2.0
"""Draft loading with vLLM's own loaders, at the level of allocations.

For what the engine can't run on a CPU: the V2 loader, and pipeline parallelism.
"""

import json
import os
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkpoints import CountingModel, write_qwen3_5

LOAD_DRAFT = Path(__file__).with_name("load_draft.py")
# Every kind with the V2 loader, which the engine can't run here; one with the other.
CASES = [
    ("untied", "legacy"),
    ("untied", "v2"),
    ("tied", "v2"),
    ("moe", "v2"),
    ("multimodal", "v2"),
]
VARIANTS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tied": True},
    "moe": {"moe": True},
    "multimodal": {"layout": "multimodal"},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CountingModel]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: write_qwen3_5(root / name, vocab_size=32_768, **options)
        for name, options in VARIANTS.items()
    }


def load(
    switch: str,
    tmp_path: Path,
    cache: Path,
    model: CountingModel,
    proposer: str = "legacy",
    stages: int = 1,
) -> dict[str, Any]:
    """Load a draft in processes of their own; return what the last stage reports."""
    options = {
        "model": str(model.path),
        "proposer": proposer,
        "pipeline_parallel_size": stages,
        "rendezvous": f"file://{tmp_path}/rendezvous-{switch}",
    }
    env = {
        **os.environ,
        "VLLM_LEAN_VOCAB": switch,
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
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-3000:]
    report: dict[str, Any] = json.loads(outputs[-1].splitlines()[-1])
    report["log"] = outputs[-1]
    return report


def load_both(*args: Any, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load stock and patched, at the same time."""
    with ThreadPoolExecutor() as pool:
        stock, patched = pool.map(
            lambda switch: load(switch, *args, **options), ("0", "1")
        )
    return stock, patched


@pytest.mark.parametrize(("variant", "proposer"), CASES)
def test_no_vocabulary_storage_at_any_moment(
    tmp_path: Path,
    warm_cache: Path,
    models: dict[str, CountingModel],
    variant: str,
    proposer: str,
) -> None:
    model = models[variant]
    stock, patched = load_both(tmp_path, warm_cache, model, proposer)

    # The recorder sees a table where there is one.
    assert stock["built"]["largest"] >= model.table_bytes
    assert patched["built"]["largest"] < model.table_bytes / 10
    assert patched["built"]["embed_tokens"]["nbytes"] == 0
    assert patched["built"]["lm_head"]["nbytes"] == 0

    assert patched["attached"] == {"embed_tokens": True, "lm_head": True}
    assert patched["final"] == stock["final"]
    mib = model.table_bytes / 2**20
    assert (
        f"{2 * mib:.1f} MiB not allocated on this rank (model.embed_tokens {mib:.1f} "
        f"MiB, lm_head {mib:.1f} MiB)"
    ) in patched["log"]


@pytest.mark.parametrize("variant", ["untied", "tied"])
def test_two_pipeline_stages_load_as_on_stock(
    tmp_path: Path, warm_cache: Path, models: dict[str, CountingModel], variant: str
) -> None:
    stock, patched = load_both(tmp_path, warm_cache, models[variant], stages=2)

    table_bytes = models[variant].table_bytes
    assert patched["built"]["embed_tokens"]["nbytes"] == table_bytes
    assert patched["built"]["lm_head"]["nbytes"] == table_bytes
    assert patched["built"]["embed_tokens"]["checksum"] != 0
    for part in ("built", "attached", "final"):
        assert patched[part] == stock[part]
