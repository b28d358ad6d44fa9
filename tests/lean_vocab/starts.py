# SPDX-License-Identifier: Apache-2.0
"""Starts of vLLM as far as its plugins, and what is looked at after one."""

import importlib
import sys
from typing import Any

from vllm_lean_vocab.series import SERIES

from .installed import is_patched, served_modules
from .processes import Outcome

MODELS = "vllm.model_executor.models"
MTP = f"{MODELS}.qwen3_5_mtp"
DEFERRED_VOCAB = f"{MODELS}.deferred_vocab"
PROPOSER = "vllm.v1.spec_decode.llm_base_proposer"
V2_LOADER = "vllm.v1.worker.gpu.spec_decode.eagle.utils"
WORKER = "vllm.v1.worker.worker_base"

BASE = {DEFERRED_VOCAB, PROPOSER, V2_LOADER, WORKER}
EVERYTHING = served_modules()
# Of the pull request that builds on none.
ON_ITS_OWN = served_modules("qwen3_5_embed_quant")
ON = "vllm-lean-vocab: on with vLLM"
IDS = ", ".join(pull_request.id for pull_request in SERIES)


def load(sets_up_logging: bool = True) -> dict[str, Any]:
    """Load vLLM's plugins, and say which of its modules would be patched.

    Args:
        sets_up_logging: vLLM's workers do before they load plugins, its main process
            doesn't.

    """
    from vllm.plugins import load_general_plugins

    importlib.import_module(MODELS)
    if sets_up_logging:
        from vllm.config.logging import LoggingConfig
        from vllm.logger import configure_logging

        configure_logging(LoggingConfig())
    load_general_plugins()
    print("plugins loaded", flush=True)
    for name in (DEFERRED_VOCAB, f"{MODELS}.quantized_vocab"):
        if is_patched(name):
            importlib.import_module(name)
    return {
        "served": sorted(name for name in EVERYTHING if is_patched(name)),
        "libcst": "libcst" in sys.modules,
    }


def served(outcome: Outcome) -> set[str]:
    return set(outcome.value["served"])


def warnings(outcome: Outcome) -> list[str]:
    return [line for line in outcome.lines("vllm-lean-vocab: ") if ON not in line]


def only_warning(outcome: Outcome) -> str:
    [warning] = warnings(outcome)
    assert "WARNING" in warning
    return warning


def check_stock(outcome: Outcome) -> None:
    assert served(outcome) == set()
    assert not outcome.lines(ON)
