# SPDX-License-Identifier: Apache-2.0
"""Tokenizer files for checkpoints that count: token ``n`` is the text ``str(n)``."""

import json
from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

# Enough for tests and demonstrations; one entry per token of a full-size
# vocabulary would make every start slower.
MAX_ENTRIES = 20_000

# Not a number: transformers looks for it within words as well.
UNKNOWN = "<unk>"

# What Qwen's processors call the placeholders.
PLACEHOLDERS = {
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
    "image": "<|image_pad|>",
    "video": "<|video_pad|>",
}
# How pictures are cut, for the processor and for the vision tower.
PATCHES = {"patch_size": 16, "temporal_patch_size": 2}
MERGE_SIZE = 2


def write_tokenizer(
    path: Path, vocab_size: int, vision_tokens: Mapping[str, int]
) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` into a directory.

    Words are separated by white space. The last of the first 20,000 tokens stands
    for every word that is no known number; tokens beyond have no text.

    Transformers reads multimodal and mixture-of-experts checkpoints of Qwen3.5 with
    a tokenizer class of its own choice: there text comes out without spaces and
    prompts have to be token ids.

    Args:
        path: An existing directory.
        vocab_size: Number of tokens that the model has.
        vision_tokens: Ids of the placeholders for pictures, by the names above;
            these tokens have no number as their text.
    """
    numbers = min(vocab_size, MAX_ENTRIES, *vision_tokens.values())
    entries = {str(n): n for n in range(numbers - 1)} | {UNKNOWN: numbers - 1}
    special = {PLACEHOLDERS[name]: n for name, n in vision_tokens.items()}
    entries |= special
    tokenizer = Tokenizer(WordLevel(entries, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer.save(str(path / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 4096,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
    }
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(config, indent=2) + "\n")


def write_processor(path: Path) -> None:
    """Write the files that say how pictures and videos are cut into patches.

    Args:
        path: An existing directory.
    """
    common = {
        **PATCHES,
        "merge_size": MERGE_SIZE,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
        # In pixels; small, because vLLM tries the largest when it starts.
        "size": {"shortest_edge": 32 * 32, "longest_edge": 128 * 128},
    }
    for file, kind in {
        "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessor"},
        "video_preprocessor_config.json": {
            "video_processor_type": "Qwen3VLVideoProcessor"
        },
    }.items():
        (path / file).write_text(json.dumps(common | kind, indent=2) + "\n")
