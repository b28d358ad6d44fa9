# SPDX-License-Identifier: Apache-2.0
"""Fixtures for the tests of the tooling."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from vllm_lean_vocab import cli

from .processes import Processes

# vLLM inspects a model's class in a process of its own, unless its cache knows it.
MODELS = (
    "Glm4MoeForCausalLM",
    "Glm4MoeMTPModel",
    "Glm4MoeLiteForCausalLM",
    "Glm4MoeLiteMTPModel",
    "GlmOcrForConditionalGeneration",
    "GlmOcrMTPModel",
    "Glm5NextForCausalLM",
    "Glm5NextForConditionalGeneration",
    "Glm5NextMTPModel",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MTP",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeMTP",
)
INSPECT = """
import sys
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.model_executor.models import registry
registry._run_in_subprocess = lambda inspect: inspect()
for name in sys.argv[1:]:
    registry.ModelRegistry.models[name].inspect_model_cls()
"""


class Result(NamedTuple):
    """What the command `vllm-lean-vocab` came to."""

    code: int
    out: str
    err: str


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """The command, as a user runs it."""

    def run(*arguments: object) -> Result:
        code = cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def warm_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache root shared by engines, in which vLLM finds all classes inspected."""
    cache = tmp_path_factory.mktemp("cache")
    env = {**os.environ, "VLLM_CACHE_ROOT": str(cache)}
    command = [sys.executable, "-c", INSPECT, *MODELS]
    subprocess.run(command, env=env, check=True, timeout=300)
    assert len(list((cache / "modelinfos").iterdir())) == len(MODELS)
    return cache


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Processes that have not loaded vLLM's plugins yet."""
    with Processes(tmp_path_factory.mktemp("processes")) as running:
        yield running
