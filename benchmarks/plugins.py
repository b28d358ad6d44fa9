# SPDX-License-Identifier: Apache-2.0
"""Plugins of others, and a quantized table to try one on."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

INT8_ROWS = Path(__file__).with_name("int8_rows.py")


def write_plugin(folder: Path, name: str, source: str) -> str:
    """Write a package with a vLLM plugin, as if installed.

    Args:
        folder: Where to; made if missing.
        name: Name of the module and of the plugin.
        source: Text of the module, which defines `register`.

    Returns:
        A `PYTHONPATH` on which it is found.

    """
    dist_info = folder / f"{name}-1.0.dist-info"
    dist_info.mkdir(parents=True)
    (dist_info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    )
    (dist_info / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\n{name} = {name}:register\n"
    )
    (folder / f"{name}.py").write_text(source)
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


def quantize_table(path: Path, keep_int8: bool = True) -> None:
    """Round the embedding of a checkpoint to int8 rows.

    Args:
        path: A checkpoint of one file.
        keep_int8: Whether the table is stored as int8, with a scale for each row, for
            the quantization `int8_rows`; else as the bfloat16 rows that these stand
            for.

    """
    file = path / "model.safetensors"
    tensors = load_file(file)
    [name] = [name for name in tensors if name.endswith("embed_tokens.weight")]
    rows = tensors[name].float()
    scale = (rows.abs().amax(dim=1, keepdim=True) / 127).to(torch.bfloat16)
    int8 = (rows / scale.float()).round().clamp(-127, 127).to(torch.int8)
    if keep_int8:
        tensors |= {name: int8, f"{name}_scale": scale}
        change_config(path, quantization_config={"quant_method": "int8_rows"})
    else:
        tensors[name] = int8.to(scale.dtype) * scale
    save_file(tensors, file, {"format": "pt"})


def change_config(path: Path, **entries: Any) -> None:
    """Set entries of a checkpoint's `config.json`."""
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
