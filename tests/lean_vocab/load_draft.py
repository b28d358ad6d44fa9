# SPDX-License-Identifier: Apache-2.0
"""Loads a target's stage and its draft with vLLM's own loaders, and reports on both.

Run as a file, one process per pipeline stage, with options as one JSON object:
`model`, `proposer` (`legacy` or `v2`), `pipeline_parallel_size`, `rank`, `rendezvous`
(a file URL). Prints one JSON object as its last line.

The engine itself can't be used for this on a CPU: it has no V2 runner there, and does
not serve a draft with more than one pipeline stage.
"""

import json
import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AllocationRecorder(TorchDispatchMode):
    """Records the size in bytes of every storage that an operator allocates.

    A storage that an operator was given, such as one mapped from a file, is none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = [0]
        self.seen: dict[int, torch.UntypedStorage] = {}  # kept: no address comes twice

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self._see((args, kwargs))
        result = func(*args, **(kwargs or {}))
        self.sizes += self._see(result)
        return result

    def _see(self, values: Any) -> list[int]:
        new = []
        for value in tree_leaves(values):
            if isinstance(value, torch.Tensor):
                value = value.untyped_storage()
            if isinstance(value, torch.UntypedStorage) and value.device.type != "meta":
                if value.data_ptr() not in self.seen:
                    new.append(value.nbytes())
                self.seen[value.data_ptr()] = value
        return new


def describe(module: Any) -> dict[str, Any]:
    """Return a module's class, its parameters' size in bytes and a checksum."""
    parameters = [] if module is None else list(module.parameters())
    return {
        "class": type(module).__name__,
        "nbytes": sum(p.nbytes for p in parameters),
        "checksum": sum(float(p.double().sum()) for p in parameters),
    }


def main() -> None:
    """Load, and print what the draft was before and after the proposer shared."""
    options = json.loads(sys.argv[1])
    pipeline_parallel_size = options.get("pipeline_parallel_size", 1)
    rank = options.get("rank", 0)

    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    # As vLLM's CPU model runner does.
    torch.accelerator.empty_cache = lambda: None
    config = EngineArgs(
        options["model"],
        speculative_config={"method": "mtp", "num_speculative_tokens": 1},
        pipeline_parallel_size=pipeline_parallel_size,
        distributed_executor_backend="mp",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=512,
    ).create_engine_config()
    # Not earlier: the plugins are loaded by now.
    from vllm.v1.spec_decode import llm_base_proposer
    from vllm.v1.worker.gpu.spec_decode.eagle import utils as v2

    built: dict[str, Any] = {}

    def recording_get_model(*args: Any, **kwargs: Any) -> Any:
        with AllocationRecorder() as recorder:
            draft = get_model(*args, **kwargs)
        built["largest"] = max(recorder.sizes)
        built["embed_tokens"] = describe(draft.model.embed_tokens)
        built["lm_head"] = describe(draft.lm_head)
        return draft

    llm_base_proposer.get_model = v2.get_model = recording_get_model
    with set_current_vllm_config(config):
        init_distributed_environment(
            pipeline_parallel_size, rank, options["rendezvous"], 0, backend="gloo"
        )
        initialize_model_parallel(1, pipeline_parallel_size)
        target = get_model(vllm_config=config)
        if rank < pipeline_parallel_size - 1:
            print(json.dumps({"rank": rank}))
            return
        if options["proposer"] == "v2":
            draft = v2.load_eagle_model(target, config)
        else:
            from vllm.v1.spec_decode.eagle import EagleProposer

            proposer = EagleProposer(config, torch.device("cpu"))
            proposer.load_model(target)
            draft = proposer.model

    language_model = target
    if hasattr(target, "get_language_model"):
        language_model = target.get_language_model()
    attached = {
        "embed_tokens": draft.model.embed_tokens is language_model.model.embed_tokens,
        "lm_head": draft.lm_head is language_model.lm_head,
    }
    final = {
        "embed_tokens": describe(draft.model.embed_tokens),
        "lm_head": describe(draft.lm_head),
    }
    print(json.dumps({"built": built, "attached": attached, "final": final}))


if __name__ == "__main__":
    main()
