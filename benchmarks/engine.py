# SPDX-License-Identifier: Apache-2.0
"""Runs prompts through a real engine in a process group of its own.

``python -m benchmarks.engine`` takes the arguments of ``run_engine`` as one JSON
object, as its argument or on standard input, and prints the result as JSON.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.loading import NoLoadingWindow, WorkerLoading
from benchmarks.process import (
    EXTENSION_CLASS,
    EngineProcess,
    Environment,
    engine_process,
    terminate_cleanly,
)

WORKER = Path(__file__).with_name("engine_worker.py")

# Hybrid models with speculative decoding on CPU can't have a prefix cache.
ENGINE_ARGS = {
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "max_model_len": 512,
    "disable_log_stats": False,
    "worker_extension_cls": EXTENSION_CLASS,
}


class EngineFailed(RuntimeError):
    """The engine did not finish; the message ends with the last lines of its log."""


@dataclass(frozen=True)
class EngineRun:
    """What an engine generated and how its memory behaved.

    Attributes:
        token_ids: The generated token ids, per prompt.
        texts: The same as text; empty strings without a tokenizer.
        drafts: How often the draft was asked.
        draft_tokens: How many tokens it proposed.
        accepted_tokens: How many of them the target accepted.
        vllm: vLLM's version.
        log: File with everything the engine printed.
        workers: Memory of each worker while its draft loaded; empty if the log
            or the samples don't show it.
        no_loading: Why ``workers`` is empty, or None.
        device: What each worker measured of its GPU, by rank; empty without one.
        runner: The kind of model runner, ``legacy`` or ``v2``.
    """

    token_ids: list[list[int]]
    texts: list[str]
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    vllm: str
    log: Path
    workers: list[WorkerLoading]
    no_loading: str | None
    device: list[dict[str, float]] = field(default_factory=list)
    runner: str = "legacy"

    @property
    def loading(self) -> list[WorkerLoading]:
        """Memory of each worker while its draft loaded, by process id.

        Raises:
            NoLoadingWindow: If the log or the samples don't show it.
        """
        if self.no_loading is not None:
            raise NoLoadingWindow(f"{self.no_loading}; the log is {self.log}")
        return self.workers

    def to_json(self) -> dict[str, Any]:
        """Return everything but the raw samples, ready for ``json.dump``."""
        result = asdict(self) | {"log": str(self.log)}
        result["loading"] = [worker.figures() for worker in self.workers]
        del result["workers"]
        return result


def run_engine(
    model: Path | str,
    *,
    prompts: Sequence[Sequence[int]],
    log: Path,
    timeout: float,
    env: Environment | None = None,
    max_tokens: int = 48,
    num_speculative_tokens: int = 1,
    method: str = "mtp",
    draft: Path | None = None,
    lora: Path | None = None,
    python: Path | str = sys.executable,
    **engine_args: Any,
) -> EngineRun:
    """Serve prompts one at a time, at temperature zero, and watch the memory.

    Nothing of the engine is left running when this returns or raises.

    Args:
        model: Directory of the checkpoint.
        prompts: Token ids of each prompt.
        log: File that the engine's output goes to.
        timeout: Seconds that the whole run may take.
        env: Changes to this process's environment; None removes a variable.
        max_tokens: Number of tokens to generate per prompt.
        num_speculative_tokens: Tokens per draft; 0 is no speculative decoding.
        method: Kind of draft.
        draft: Directory of its checkpoint, where that is not the target's.
        lora: Directory of an adapter that prompts are served with; it takes the
            engine's ``enable_lora``.
        python: The interpreter to run the engine with.
        **engine_args: Further arguments of ``vllm.LLM``, such as
            ``tensor_parallel_size`` or ``enforce_eager``.

    Raises:
        EngineFailed: If the engine ends with an error or takes too long.
        OSError: If it can't be started or the log can't be written.
    """
    arguments = {**ENGINE_ARGS, **engine_args}
    if num_speculative_tokens:
        arguments["speculative_config"] = {
            "method": method,
            "num_speculative_tokens": num_speculative_tokens,
            **({"model": str(draft)} if draft else {}),
        }
    options = {
        "model": str(model),
        "prompts": [list(prompt) for prompt in prompts],
        "max_tokens": max_tokens,
        "engine_args": arguments,
        "lora": str(lora) if lora else None,
    }
    changes = dict(env or {})
    if arguments.get("tensor_parallel_size", 1) > 1:
        # Bound to cores of their own, the workers would need more than two.
        changes.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    with tempfile.TemporaryDirectory(prefix="engine-") as directory:
        request, result = Path(directory, "request"), Path(directory, "result")
        request.write_text(json.dumps(options))
        # -P keeps this folder's modules from being imported by their bare names.
        command = [str(python), "-P", str(WORKER), str(request), str(result)]
        with engine_process(command, env=changes, log=log) as process:
            _wait(process, timeout)
            answer = json.loads(result.read_text())
    settled = answer.pop("settled")
    workers, no_loading = [], None
    try:
        workers = process.loading(settled)
    except NoLoadingWindow as error:
        no_loading = str(error)
    return EngineRun(**answer, log=log, workers=workers, no_loading=no_loading)


def _wait(process: EngineProcess, timeout: float) -> None:
    """Wait for the engine to end well.

    Raises:
        EngineFailed: If it doesn't.
    """
    try:
        code = process.popen.wait(timeout)
    except subprocess.TimeoutExpired:
        problem = f"did not finish within {timeout:g} s"
    else:
        if code == 0:
            return
        process.log.close()
        problem = f"ended with exit code {code}"
    raise EngineFailed(
        f"the engine {problem}; the full log is {process.log.path}; its last lines:\n"
        + process.log.tail()
    ) from None


def main() -> None:
    """Run one engine with the options given as JSON; print the result."""
    options = json.loads(sys.argv[1] if len(sys.argv) > 1 else sys.stdin.read())
    options["log"] = Path(options.get("log", "engine.log"))
    options.setdefault("timeout", 600.0)
    with terminate_cleanly():
        try:
            run = run_engine(options.pop("model"), **options)
        except EngineFailed as error:
            sys.exit(str(error))
    json.dump(run.to_json(), sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
