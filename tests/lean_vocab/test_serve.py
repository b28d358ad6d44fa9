# SPDX-License-Identifier: Apache-2.0
"""The real HTTP server, and loads that have to fail."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkpoints import CountingModel, write_qwen3_5
from benchmarks.engine import EngineFailed, run_engine
from benchmarks.plugins import write_plugin
from benchmarks.server import serving

pytestmark = pytest.mark.engine

# A plugin whose proposers do not share the LM head. It patches a class that this
# project leaves alone, once that is imported: a plugin may be called before ours.
FOREIGN = """
import sys
from importlib.machinery import PathFinder

NAME = "vllm.v1.spec_decode.eagle"

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != NAME:
            return None
        spec = PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            module.EagleProposer._maybe_share_lm_head = lambda self, target: None
        spec.loader.exec_module = exec_module
        return spec

def register():
    if Finder not in sys.meta_path:
        sys.meta_path.insert(0, Finder)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CountingModel:
    return write_qwen3_5(tmp_path_factory.mktemp("model"), vocab_size=32_768)


def test_server(model: CountingModel, tmp_path: Path, warm_cache: Path) -> None:
    """One pull request asked for by id, and an environment that vLLM validates."""
    env = {"VLLM_LEAN_VOCAB": "qwen3_5_mtp", "VLLM_CACHE_ROOT": str(warm_cache)}
    log = tmp_path / "server.log"
    arguments = ["--fail-on-environ-validation"]
    with serving(model.path, env=env, log=log, arguments=arguments) as server:
        server.wait_until_ready(timeout=300)
        answer = server.complete("7 8 9", max_tokens=24)
        counters = server.counters()
    assert answer.text.split() == [str(number) for number in range(10, 34)]
    assert answer.usage["completion_tokens"] == 24
    assert 0 < counters.accepted_tokens < counters.draft_tokens
    text = log.read_text()
    assert "on with vLLM" in text and "deferred_vocab, qwen3_5_mtp (" in text
    assert "64.0 MiB not allocated on this rank" in text
    assert "Unknown vLLM environment variable" not in text


def test_proposer_that_does_not_attach_fails_the_load(
    model: CountingModel, tmp_path: Path, warm_cache: Path
) -> None:
    env: dict[str, str | None] = {
        "PYTHONPATH": write_plugin(tmp_path / "site", "foreign_proposer", FOREIGN),
        "VLLM_CACHE_ROOT": str(warm_cache),
        "VLLM_LEAN_VOCAB": None,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    [prompt] = model.prompts(1)
    log_file = tmp_path / "log"
    options: dict[str, Any] = {"prompts": [prompt], "log": log_file, "timeout": 300}
    with pytest.raises(EngineFailed):
        run_engine(model.path, env=env, **options)
    log = log_file.read_text()
    [message] = {
        line.split("RuntimeError: ", 1)[1]
        for line in log.splitlines()
        if "RuntimeError: Qwen3_5MTP" in line
    }
    assert "lm_head was left unallocated" in message
    assert "VLLM_LEAN_VOCAB=0" in message

    # The switch that the message names is the remedy.
    env["VLLM_LEAN_VOCAB"] = "0"
    stock = run_engine(model.path, env=env, **options)
    assert stock.token_ids == [model.continuation(prompt, 48)]
