# SPDX-License-Identifier: Apache-2.0
"""Loads drafts with proposers that stand in for those of other platforms.

Run as a file, as `load_draft_classes` is, with a `proposer` in each job, one of
`PROPOSERS`. A worker is started around it, as far as all platforms share it. Reports of
each job how far that came: `failed` is empty, `load` or `start`, `message` says why,
and `own` names the vocabulary tables that the draft has of its own in the end.
"""

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

COLLECT = gc.collect  # which is stopped for speed


def attach_embedding(draft: nn.Module, target: nn.Module) -> None:
    draft.model.embed_tokens = target.model.embed_tokens


def attach_both(draft: nn.Module, target: nn.Module) -> None:
    attach_embedding(draft, target)
    if hasattr(draft, "lm_head"):
        draft.lm_head = target.lm_head
    for layer in getattr(draft.model.layers, "values", list)():
        layer.shared_head.head = target.lm_head


def attach_nothing(draft: nn.Module, target: nn.Module) -> None:
    pass


def own_load_model(attach: Callable[[nn.Module, nn.Module], None]) -> Any:
    """A proposer that overrides all of `load_model`."""
    from vllm.v1.spec_decode.eagle import EagleProposer

    class Proposer(EagleProposer):
        def load_model(self, target_model: nn.Module) -> None:
            self.model = self._get_model()
            attach(self.model, target_model)

    return Proposer


def own_method(name: str) -> Any:
    """A proposer that overrides a method with one that does nothing."""
    from vllm.v1.spec_decode.eagle import EagleProposer

    return type("Proposer", (EagleProposer,), {name: lambda self, target: None})


def no_subclass(attach: Callable[[nn.Module, nn.Module], None]) -> Any:
    """A proposer that has nothing to do with vLLM's but its loaders."""
    from vllm.model_executor.model_loader import get_model

    class Proposer:
        def __init__(self, config: Any, device: torch.device) -> None:
            self.config = config

        def load_model(self, target_model: nn.Module) -> None:
            self.model = get_model(
                vllm_config=self.config,
                model_config=self.config.speculative_config.draft_model_config,
            )
            attach(self.model, target_model)

    return Proposer


PROPOSERS: dict[str, Callable[[], Any]] = {
    "own load_model": lambda: own_load_model(attach_both),
    "own load_model, no head": lambda: own_load_model(attach_embedding),
    "own load_model, nothing": lambda: own_load_model(attach_nothing),
    "own _maybe_share_lm_head": lambda: own_method("_maybe_share_lm_head"),
    "own _maybe_share_embeddings": lambda: own_method("_maybe_share_embeddings"),
    "no subclass": lambda: no_subclass(attach_both),
    "no subclass, nothing": lambda: no_subclass(attach_nothing),
}


def start(config: Any) -> None:
    """Take a worker's step between loading and serving."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    worker = SimpleNamespace(initialize_from_config=lambda kv_cache_config: None)
    wrapper: Any = object.__new__(WorkerWrapperBase)
    wrapper.worker, wrapper.vllm_config, wrapper.global_rank = worker, config, 0
    with mock.patch.object(gc, "collect", COLLECT):
        wrapper.initialize_from_config([None])


def do(job: dict[str, Any]) -> dict[str, Any]:
    """Do one job."""
    from load_draft_classes import configured, target_tables, vocabulary

    with configured(job) as config:
        target = target_tables(config)
        proposer = PROPOSERS[job["proposer"]]()(config, torch.device("cpu"))
        step = "load"
        try:
            proposer.load_model(target)
            step = "start"
            start(config)
        except RuntimeError as error:
            return {"failed": step, "message": str(error)}
        tables = vocabulary(proposer.model, config.model_config.get_vocab_size())
        own = [p for p, m in tables.items() if m not in set(target.modules())]
        return {"failed": "", "message": "", "own": own}


def main() -> None:
    """Do the jobs, and print their reports."""
    sys.path.append(str(Path(__file__).parent))
    import load_draft_classes

    load_draft_classes.main(do)


if __name__ == "__main__":
    main()
