# SPDX-License-Identifier: Apache-2.0
"""Tokenizer files for checkpoints that count: token ``n`` is the text ``str(n)``."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

# Enough for tests and demonstrations; one entry per token of a full-size
# vocabulary would make every start slower.
MAX_ENTRIES = 20_000

# Not a number: transformers looks for it within words as well.
UNKNOWN = "<unk>"

# How pictures are cut, for the processor and for the vision tower.
PATCHES = {"patch_size": 16, "temporal_patch_size": 2}
MERGE_SIZE = 2


@dataclass(frozen=True)
class Processor:
    """What transformers reads the pictures and videos of some models with.

    Attributes:
        name: Start of the names of its classes.
        image_name: The same for the class that cuts pictures.
        placeholders: Text of each placeholder token, by the name that
            ``config.json`` has for it.
    """

    name: str
    image_name: str
    placeholders: Mapping[str, str]


QWEN3_VL = Processor(
    name="Qwen3VL",
    image_name="Qwen2VL",
    placeholders={
        "vision_start": "<|vision_start|>",
        "vision_end": "<|vision_end|>",
        "image": "<|image_pad|>",
        "video": "<|video_pad|>",
    },
)
GLM_46V = Processor(
    name="Glm46V",
    image_name="Glm46V",
    placeholders={
        "image_start": "<|begin_of_image|>",
        "image_end": "<|end_of_image|>",
        "video_start": "<|begin_of_video|>",
        "video_end": "<|end_of_video|>",
        "image": "<|image|>",
        "video": "<|video|>",
    },
)
GLM5_NEXT = replace(GLM_46V, name="Glm5Next", image_name="Glm5Next")


def write_tokenizer(path: Path, vocab_size: int, special: Mapping[str, int]) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` into a directory.

    Words are separated by white space. The last of the first 20,000 tokens stands
    for every word that is no known number; tokens beyond have no text.

    Transformers reads multimodal and mixture-of-experts checkpoints of Qwen3.5 with
    a tokenizer class of its own choice: there text comes out without spaces and
    prompts have to be token ids.

    Args:
        path: An existing directory.
        vocab_size: Number of tokens that the model has.
        special: Ids of the tokens whose text is no number, by their text.
    """
    numbers = min(vocab_size, MAX_ENTRIES, *special.values())
    entries = {str(n): n for n in range(numbers - 1)} | {UNKNOWN: numbers - 1}
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


def write_processor(path: Path, processor: Processor) -> None:
    """Write the files that say how pictures and videos are cut into patches.

    Args:
        path: An existing directory.
        processor: What reads them.
    """
    common = {
        **PATCHES,
        "merge_size": MERGE_SIZE,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": f"{processor.name}Processor",
        # In pixels; small, because vLLM tries the largest when it starts.
        "size": {"shortest_edge": 32 * 32, "longest_edge": 128 * 128},
    }
    for file, kind in {
        "preprocessor_config.json": {
            "image_processor_type": f"{processor.image_name}ImageProcessor"
        },
        "video_preprocessor_config.json": {
            "video_processor_type": f"{processor.name}VideoProcessor"
        },
    }.items():
        (path / file).write_text(json.dumps(common | kind, indent=2) + "\n")
