# SPDX-License-Identifier: Apache-2.0
"""Loads drafts in other formats, and loads weights into drafts once more.

Run as a file, as `load_draft_classes` is. Each job says what to `do`:

- `save`: build and fill the draft, and save it as `sharded_state` to the folder `to`;
- `load`: load it and give it the target's tables;
- `reload`: do so, and load its checkpoint again, with tables of `VALUE` in it.

Reports of each job the names of the draft's vocabulary tables that are the `target's`,
the value of all elements of each of the target's `tables`, and, of all else that the
draft holds, a `digest`.
"""

import hashlib
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import nn

VALUE = 9.0


def digest(draft: nn.Module, target: nn.Module) -> str:
    """Return a hash of a draft's parameters and buffers that aren't the target's."""
    shared = set(target.parameters())
    found = hashlib.sha256()
    for name, tensor in sorted(draft.state_dict(keep_vars=True).items()):
        if tensor not in shared:
            found.update(name.encode())
            data = tensor.detach().contiguous().flatten()
            found.update(data.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def save(config: Any, folder: Path) -> None:
    """Save a draft before it is given anything of its target."""
    from vllm.model_executor.model_loader import get_model
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

    model_config = config.speculative_config.draft_model_config
    draft = get_model(vllm_config=config, model_config=model_config)
    folder.mkdir()
    ShardedStateLoader.save_model(draft, str(folder))
    shutil.copy(Path(model_config.model) / "config.json", folder)


def do(job: dict[str, Any]) -> dict[str, Any]:
    """Do one job."""
    from load_draft_classes import (
        LOADERS,
        configured,
        describe,
        target_tables,
        vocabulary,
    )

    # A CPU's linear layers keep a packed copy alone: that couldn't be saved.
    packing = "vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm"
    with configured(job) as config, mock.patch(packing):
        if job["do"] == "save":
            save(config, Path(job["to"]))
            return {}
        target = target_tables(config)
        draft: Any = LOADERS[job["loader"]](target, config)
        if job["do"] == "reload":
            tensors = load_file(Path(job["model"]) / "model.safetensors")
            draft.load_weights(
                (n, torch.full_like(t, VALUE)) for n, t in tensors.items()
            )
        tables = {"embed_tokens": target.model.embed_tokens, "lm_head": target.lm_head}
        names = {module: name for name, module in tables.items()}
        found = vocabulary(draft, config.model_config.get_vocab_size())
        return {
            "target's": {p: names.get(m, "") for p, m in found.items()},
            "tables": {n: describe(m)["value"] for n, m in tables.items()},
            "digest": digest(draft, target),
        }


def main() -> None:
    """Do the jobs, and print their reports."""
    sys.path.append(str(Path(__file__).parent))
    import load_draft_classes

    load_draft_classes.main(do)


if __name__ == "__main__":
    main()
