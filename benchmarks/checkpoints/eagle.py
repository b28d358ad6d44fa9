# SPDX-License-Identifier: Apache-2.0
"""Llama checkpoints with an EAGLE or an EAGLE3 draft in a checkpoint of its own.

A draft may bring vocabulary tables. One that is no copy of the target's has a basis of
its own, so a draft that was given the wrong table would be seen.
"""

import json
from abc import abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from benchmarks.checkpoints.counting import (
    HEAD_DIM,
    HIDDEN_WEIGHT,
    NOISE,
    CountingModel,
    NamedTensors,
    Shards,
    bf16,
    save_tensors,
)
from benchmarks.checkpoints.decoder import DecoderWeights

DraftTable = Literal["none", "copy", "own"]

# Size of queries and keys, which are equal: a token attends to nothing but itself.
SELF_ATTENTION = 3.0


def write_eagle(
    path: Path,
    *,
    vocab_size: int,
    hidden_size: int,
    embed_tokens: DraftTable = "none",
    shards: Shards = "single",
    seed: int = 0,
) -> CountingModel:
    """Write a counting Llama checkpoint and one of its EAGLE draft.

    The draft has no LM head: vLLM can't load one that has.

    Args:
        path: Directory to write the target to, and the draft to ``draft`` in it;
            made if missing, files in them are overwritten.
        vocab_size: Rows of the vocabulary tables.
        hidden_size: Hidden size, a multiple of 64.
        embed_tokens: The draft's embedding: ``none``, a ``copy`` of the target's, or
            its ``own``.
        shards: Of the target: ``single`` for one file, ``tables`` for one shard per
            table and one for everything else, with an index.
        seed: Seed of everything that is random.

    Returns:
        The checkpoints and what they generate.

    Raises:
        ValueError: If a size is not one that works.
    """
    weights = _Eagle(
        embed_tokens=embed_tokens,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        seed=seed,
    )
    return weights.write(path, shards)


def write_eagle3(
    path: Path,
    *,
    vocab_size: int,
    hidden_size: int,
    embed_tokens: DraftTable = "none",
    lm_head: DraftTable = "own",
    draft_vocab_size: int | None = None,
    tied: bool = False,
    shards: Shards = "single",
    seed: int = 0,
) -> CountingModel:
    """Write a counting Llama checkpoint and one of its EAGLE3 draft.

    Args, results and errors are those of ``write_eagle``, and these:

    Args:
        lm_head: The draft's LM head, in the same way.
        draft_vocab_size: Rows of the draft's LM head, if they are fewer than the
            target's: some tokens, evenly spread, that the draft can propose.
        tied: Whether the target's checkpoint has no LM head of its own.

    Raises:
        ValueError: If a draft without an LM head is to have a vocabulary of its own.
    """
    weights = _Eagle3(
        embed_tokens=embed_tokens,
        lm_head=lm_head,
        draft_vocab_size=draft_vocab_size,
        tied=tied,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        seed=seed,
    )
    return weights.write(path, shards)


class _LlamaAndDraft(DecoderWeights):
    """The tensors and the configurations of both checkpoints.

    Attributes:
        dense_layers: All of them: Llama has no mixtures of experts.
    """

    dense_layers: ClassVar[int] = DecoderWeights.num_layers

    def __init__(
        self, *, embed_tokens: DraftTable, lm_head: DraftTable = "none", **options: Any
    ) -> None:
        super().__init__(mtp_layers=1, **options)
        # Of each of the draft's tables, its basis and whether rows are long and short.
        self.kinds: dict[str, tuple[torch.Tensor, bool]] = {}
        self.draft_embedding, self.draft_head = self.embedding_basis, self.head_basis
        if embed_tokens == "own":
            self.draft_embedding = self.orthogonal()
        if lm_head == "own":
            self.draft_head = self.orthogonal()
        if embed_tokens != "none":
            is_head = self.tied and embed_tokens == "copy"
            self.kinds["embed_tokens.weight"] = (self.draft_embedding, is_head)
        if lm_head != "none":
            self.kinds["lm_head.weight"] = (self.draft_head, True)

    @abstractmethod
    def draft_config(self) -> dict[str, Any]:
        """Return where the draft's configuration differs from the target's."""

    @abstractmethod
    def draft_layer(self) -> NamedTensors:
        """Yield the draft's tensors, without vocabulary tables."""

    def draft_tables(self) -> dict[str, torch.Tensor]:
        """Return the draft's vocabulary tables and what belongs to them."""
        return dict(
            zip(self.kinds, self.draw_tables(*self.kinds.values()), strict=True)
        )

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **self.sizes(),
            **self.attention_sizes(),
            "num_hidden_layers": self.num_layers,
            "intermediate_size": self.hidden,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500_000},
        }

    def self_attention(self, prefix: str) -> NamedTensors:
        return self.attention(prefix, norms=False)

    def draft(self) -> NamedTensors:
        return iter(())  # the target's checkpoint holds none

    def write(self, path: Path, shards: Shards = "single") -> CountingModel:
        model = super().write(path, shards)
        draft = path / "draft"
        draft.mkdir(exist_ok=True)
        config = self.config() | {"num_hidden_layers": 1, "dtype": "bfloat16"}
        config |= {"tie_word_embeddings": False} | self.draft_config()
        (draft / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        layer = dict(self.draft_layer())
        save_tensors(draft, layer, self.draft_tables(), "single")
        own = sum(tensor.nbytes for tensor in layer.values())
        return replace(model, draft=draft, draft_bytes=own)


class _Eagle(_LlamaAndDraft):
    """An EAGLE draft: a layer that isn't normalized, neither before nor behind it."""

    def draft_config(self) -> dict[str, Any]:
        return {}

    def draft_layer(self) -> NamedTensors:
        yield "fc.weight", self.joining(self.draft_embedding)
        for name, tensor in self.layer("layers.0.", dense=True, counts=False):
            if "input_layernorm" not in name:
                yield name, tensor


class _Eagle3(_LlamaAndDraft):
    """An EAGLE3 draft, where the embedding is seen by the attention alone."""

    def __init__(self, *, draft_vocab_size: int | None, **options: Any) -> None:
        super().__init__(**options)
        if draft_vocab_size is not None:
            if "lm_head.weight" not in self.kinds:
                raise ValueError("a vocabulary of its own needs an LM head of its own")
            if not 1 <= draft_vocab_size < self.vocab_size:
                raise ValueError("a draft's own vocabulary is a part of the target's")
        self.draft_vocab_size = draft_vocab_size

    def draft_config(self) -> dict[str, Any]:
        # Values have to hold an embedding.
        heads = self.hidden // HEAD_DIM
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "draft_vocab_size": self.draft_vocab_size or self.vocab_size,
            "norm_before_residual": True,
            # The embeddings count as layer 0.
            "eagle_aux_hidden_state_layer_ids": list(range(self.num_layers + 1)),
        }

    def draft_tables(self) -> dict[str, torch.Tensor]:
        tables = super().draft_tables()
        if self.draft_vocab_size is not None:
            numbers = torch.arange(self.draft_vocab_size)
            ids = numbers * self.vocab_size // self.draft_vocab_size
            tables["lm_head.weight"] = tables["lm_head.weight"][ids]
            tables["d2t"] = ids - numbers
            tables["t2d"] = torch.zeros(self.vocab_size, dtype=torch.bool)
            tables["t2d"][ids] = True
        return tables

    def draft_layer(self) -> NamedTensors:
        # Only what the last layer gives points to the token that follows.
        rest = self.matrix(self.hidden, self.num_layers * self.hidden, NOISE)
        last = bf16(self.draft_head @ self.head_basis.T)
        yield "fc.weight", torch.cat([rest, last], dim=1)
        layer = "midlayer."
        yield f"{layer}hidden_norm.weight", self.norm() * HIDDEN_WEIGHT
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}{name}.weight", self.norm()
        # An attention that applies to each token's embedding what counts; the hidden
        # state, the second half of its input, is not read.
        similar = self.matrix(self.hidden, self.hidden, SELF_ATTENTION)
        read = {"q": similar, "k": similar, "v": torch.eye(self.hidden)}
        for letter, matrix in read.items():
            half = torch.cat([matrix, torch.zeros_like(matrix)], dim=1)
            yield f"{layer}self_attn.{letter}_proj.weight", bf16(half)
        rotation = self.rotation(self.draft_embedding, self.draft_head)
        yield f"{layer}self_attn.o_proj.weight", bf16(rotation)
        yield from self.mlp(f"{layer}mlp.", self.hidden, counts=False)
        yield "norm.weight", self.norm()
