# SPDX-License-Identifier: Apache-2.0
"""What all families of checkpoints share: how they count, and how they are written.

The target counts: token ``n`` is the text ``str(n)`` and is always followed by
``n + 1``. Nothing has to be run to know what the right output is.

How it counts. Row ``n`` of the embedding is ``Q @ c(n)``, where ``Q`` is
orthogonal and ``c(n)`` holds the cosines and sines of ``n`` times some hundred
random angles, one angle being zero. "Plus one" is then a rotation, the same for
every token, and two different rows are nearly orthogonal. The MLP of the last layer
(in a mixture of experts: the shared one) applies that rotation; its gate reads the
direction that belongs to the zero angle, in which all rows agree, so the gate is
nearly constant and the MLP nearly linear. All other layers add noise that is too
small to change the result. Row ``n`` of the LM head is ``g(n) * P @ c(n)`` with a
random row length ``g(n)`` in {1, 2}. With an untied head ``P`` differs from ``Q``,
so a draft that was given the wrong table would be seen; with a tied one both are
the same table.

Why the draft errs now and then. It sees the last token ``m`` and the target's
hidden state from before it, which points to ``m`` as well. The projection that
joins them turns the former into ``m + 1`` and adds the latter, somewhat weaker:
where row ``m`` is the long one and row ``m + 1`` a short one, the draft repeats
``m``. The target then corrects it.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from safetensors.torch import save_file

from benchmarks.tokenizer import Processor, write_processor, write_tokenizer

Layout = Literal["text", "multimodal"]
Shards = Literal["single", "tables"]
NamedTensors = Iterator[tuple[str, torch.Tensor]]

HEAD_DIM = 64
NUM_HEADS = 4
NUM_KV_HEADS = 2
NUM_EXPERTS = 4
EXPERTS_PER_TOKEN = 2

# Size of a noise layer's output relative to the token's own embedding.
NOISE = 0.2
# How far the rotated embedding outweighs the token's own in the residual stream.
ROTATION_GAIN = 6.0
# Component of every embedding row in the direction shared by all rows.
SHARED_COMPONENT = 5.0
# What the gates of the rotating MLP see; silu is close to linear there.
GATE_INPUT = 4.0
# Weight of the target's hidden state in the draft. A row is long or short (2 or
# 1), so any weight between 1/2 and 1 makes the draft err in the same places.
HIDDEN_WEIGHT = 0.7
ROWS_AT_ONCE = 16_384


@dataclass(frozen=True)
class CountingModel:
    """A checkpoint on disk and what it is known to generate.

    Attributes:
        path: The checkpoint's directory.
        vocab_size: Rows of each vocabulary table.
        hidden_size: Columns of each vocabulary table.
        tied: Whether the LM head is the embedding.
        draft_bytes: Bytes of the draft's own tensors, vocabulary tables left out.
        draft: The directory of the draft's checkpoint, where that is one of its own.
        table_bytes: Bytes of one vocabulary table in bfloat16.
    """

    path: Path
    vocab_size: int
    hidden_size: int
    tied: bool
    draft_bytes: int
    draft: Path | None = None

    @property
    def table_bytes(self) -> int:
        """Bytes of one vocabulary table in bfloat16."""
        return self.vocab_size * self.hidden_size * 2

    def continuation(self, prompt_ids: Sequence[int], n: int) -> list[int]:
        """Return the ``n`` token ids that the target generates after a prompt.

        Args:
            prompt_ids: Token ids of the prompt; only the last one matters.
            n: How many tokens are generated.

        Raises:
            ValueError: If the prompt is empty or counting runs past the vocabulary.
        """
        if not prompt_ids:
            raise ValueError("an empty prompt has no known continuation")
        first = prompt_ids[-1] + 1
        if first < 1 or first + n > self.vocab_size:
            raise ValueError(
                f"{n} tokens after {prompt_ids[-1]} do not fit into a vocabulary "
                f"of {self.vocab_size}"
            )
        return list(range(first, first + n))

    def continuations(self, prompts: int, n: int) -> list[list[int]]:
        """Return the ``n`` token ids generated after each of so many ``prompts``.

        Raises:
            ValueError: If the vocabulary is too small.
        """
        return [self.continuation(prompt, n) for prompt in self.prompts(prompts)]

    def prompts(self, n: int, length: int = 4) -> list[list[int]]:
        """Return ``n`` different prompts of ``length`` token ids each.

        Continuations of up to 200 tokens stay within the first 20,000 ids, for
        which the tokenizer has a text, if the vocabulary is that large.

        Raises:
            ValueError: If the vocabulary is too small for prompts that far apart.
        """
        last = min(self.vocab_size, 20_000) - 200 - length
        if n < 0 or last < n:
            raise ValueError(f"no room for {n} prompts in {self.vocab_size} tokens")
        starts = [last * (i + 1) // (n + 1) for i in range(n)]
        return [list(range(start, start + length)) for start in starts]


class CountingWeights(ABC):
    """The tensors and the configuration of one checkpoint.

    A family of models is a subclass that says which tensors its layers have, under
    which names, and what its configuration is.

    Attributes:
        norm_weight: Weight of a norm that only normalizes: one, or zero in families
            whose norms add one to it.
        processor: What reads pictures, in families that have multimodal checkpoints.
        multimodal: Whether there is a vision tower.
        prefix: Start of the names of the target's tensors.
    """

    norm_weight: ClassVar[float] = 1.0
    processor: ClassVar[Processor]

    def __init__(
        self,
        *,
        mtp_layers: int,
        vocab_size: int,
        hidden_size: int,
        seed: int,
        tied: bool = False,
        layout: Layout = "text",
    ) -> None:
        """Draw what is random about counting.

        Args:
            mtp_layers: Number of MTP layers.
            vocab_size: Rows of the vocabulary tables.
            hidden_size: Hidden size, a multiple of 64.
            seed: Seed of everything that is random.
            tied: Whether the checkpoint has no LM head of its own.
            layout: ``text`` for a text-only checkpoint (``model.*``), ``multimodal``
                for one with a vision tower (``model.language_model.*``).

        Raises:
            ValueError: If a size is not one that works.
        """
        if hidden_size < 128 or hidden_size % 64:
            raise ValueError(
                f"hidden_size {hidden_size} is not a multiple of 64 from 128"
            )
        if vocab_size < 2 or mtp_layers < 1:
            raise ValueError("a vocabulary of two and one MTP layer are the least")
        self.vocab_size = vocab_size
        self.hidden = hidden_size
        self.mtp_layers = mtp_layers
        self.tied = tied
        self.multimodal = layout == "multimodal"
        self.prefix = "model.language_model." if self.multimodal else "model."
        self.generator = torch.Generator().manual_seed(seed)

        pairs = hidden_size // 2
        angles = torch.rand(pairs, generator=self.generator, dtype=torch.float64)
        self.angles = angles * 2 * torch.pi
        self.angles[0] = 0.0
        amplitude = (hidden_size - SHARED_COMPONENT**2) / (pairs - 1)
        self.amplitudes = torch.full((pairs,), amplitude, dtype=torch.float64).sqrt()
        self.amplitudes[0] = SHARED_COMPONENT
        self.embedding_basis = self.orthogonal()
        self.head_basis = self.embedding_basis if tied else self.orthogonal()
        self.lengths = 1 + torch.randint(2, (vocab_size, 1), generator=self.generator)

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Return ``config.json``; ``write`` adds the data type and the tying."""

    @abstractmethod
    def target(self) -> NamedTensors:
        """Yield the target's tensors, without its vocabulary tables."""

    @abstractmethod
    def draft(self) -> NamedTensors:
        """Yield the tensors of the MTP layers, without vocabulary tables."""

    def tables(self) -> dict[str, torch.Tensor]:
        """Return the vocabulary tables, bfloat16 of (vocabulary, hidden)."""
        name = f"{self.prefix}embed_tokens.weight"
        if self.tied:
            # The first norm of the target and of the draft undoes the lengths.
            return {name: self.draw_tables((self.embedding_basis, True))[0]}
        embedding, head = self.draw_tables(
            (self.embedding_basis, False), (self.head_basis, True)
        )
        return {name: embedding, "lm_head.weight": head}

    def draw_tables(self, *kinds: tuple[torch.Tensor, bool]) -> list[torch.Tensor]:
        """Return vocabulary tables, bfloat16 of (vocabulary, hidden).

        Args:
            kinds: Of each table, its basis and whether its rows are long and short
                ones, as an LM head's are.
        """
        shape = (self.vocab_size, self.hidden)
        tables = [torch.empty(shape, dtype=torch.bfloat16) for _ in kinds]
        for start in range(0, self.vocab_size, ROWS_AT_ONCE):
            stop = min(start + ROWS_AT_ONCE, self.vocab_size)
            rows = self._coordinates(start, stop)
            for table, (basis, is_head) in zip(tables, kinds, strict=True):
                drawn = self.lengths[start:stop] * rows if is_head else rows
                table[start:stop] = drawn @ basis.T.float()
        return tables

    def placeholders(self) -> dict[str, int]:
        """Return the placeholders' ids, the last ones; text-only models have none."""
        names = tuple(self.processor.placeholders) if self.multimodal else ()
        first = self.vocab_size - len(names)
        return {name: first + offset for offset, name in enumerate(names)}

    def write(self, path: Path, shards: Shards = "single") -> CountingModel:
        """Write the checkpoint into a directory.

        Args:
            path: Directory to write to; made if missing, files in it are overwritten.
            shards: ``single`` for one file, ``tables`` for one shard per table and
                one for everything else, with an index.

        Returns:
            The checkpoint and what it generates.
        """
        path.mkdir(parents=True, exist_ok=True)
        config = self.config() | {
            "dtype": "bfloat16",
            "tie_word_embeddings": self.tied,
        }
        (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        special = {
            self.processor.placeholders[name]: n
            for name, n in self.placeholders().items()
        }
        write_tokenizer(path, self.vocab_size, special)
        if self.multimodal:
            write_processor(path, self.processor)
        target, draft = dict(self.target()), dict(self.draft())
        save_tensors(path, {**target, **draft}, self.tables(), shards)
        return CountingModel(
            path,
            self.vocab_size,
            self.hidden,
            self.tied,
            draft_bytes=sum(tensor.nbytes for tensor in draft.values()),
        )

    def with_vision(
        self, text: dict[str, Any], vision: dict[str, Any]
    ) -> dict[str, Any]:
        """Return what a multimodal checkpoint's configuration consists of.

        Args:
            text: The part that describes the language model.
            vision: The part that describes the vision tower.
        """
        return {
            "text_config": text | {"tie_word_embeddings": self.tied},
            "vision_config": vision,
            **{f"{name}_token_id": n for name, n in self.placeholders().items()},
        }

    def sizes(self) -> dict[str, Any]:
        """Return what every language model's configuration has."""
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 4096,
        }

    def attention_sizes(self) -> dict[str, Any]:
        """Return the part of the configuration that describes ``attention``."""
        return {
            "num_attention_heads": NUM_HEADS,
            "num_key_value_heads": NUM_KV_HEADS,
            "head_dim": HEAD_DIM,
        }

    def attention(
        self, prefix: str, gated: bool = False, norms: bool = True
    ) -> NamedTensors:
        """Yield a softmax attention.

        Args:
            prefix: Of the tensors' names.
            gated: Whether each query has an output gate, stored together with it.
            norms: Whether queries and keys are normalized.
        """
        queries, keys = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
        stored = 2 * queries if gated else queries
        yield f"{prefix}q_proj.weight", self.matrix(stored, self.hidden)
        yield f"{prefix}k_proj.weight", self.matrix(keys, self.hidden)
        yield f"{prefix}v_proj.weight", self.matrix(keys, self.hidden)
        yield f"{prefix}o_proj.weight", self.matrix(self.hidden, queries, NOISE)
        if norms:
            yield f"{prefix}q_norm.weight", self.norm(HEAD_DIM)
            yield f"{prefix}k_norm.weight", self.norm(HEAD_DIM)

    def mixture(
        self,
        prefix: str,
        shared: str,
        counts: bool,
        expert_size: int,
        shared_gain: float = 1.0,
    ) -> NamedTensors:
        """Yield a mixture of experts whose shared MLP counts or is noise.

        Args:
            prefix: Of the tensors' names.
            shared: What the shared MLP is called; its intermediate size is the
                hidden size.
            counts: Whether the shared MLP counts; the experts are noise.
            expert_size: Intermediate size of an expert.
            shared_gain: Factor on the shared MLP's output.
        """
        yield f"{prefix}gate.weight", self.matrix(NUM_EXPERTS, self.hidden)
        yield from self.mlp(f"{prefix}{shared}.", self.hidden, counts, shared_gain)
        for expert in range(NUM_EXPERTS):
            expert_prefix = f"{prefix}experts.{expert}."
            yield from self.mlp(expert_prefix, expert_size, counts=False)

    def mlp(
        self, prefix: str, size: int, counts: bool, gain: float = 1.0
    ) -> NamedTensors:
        """Yield a gated MLP that counts or is noise; counting needs ``size == hidden``.

        Args:
            prefix: Of the tensors' names.
            size: Intermediate size.
            counts: Whether it counts.
            gain: Factor on the output.
        """
        if counts:
            shared = self.embedding_basis[:, 0] * (GATE_INPUT / SHARED_COMPONENT)
            gate = bf16(shared.expand(size, self.hidden))
            up = bf16(self.rotation())
            passed = torch.nn.functional.silu(torch.tensor(GATE_INPUT)).item()
            down = bf16(torch.eye(size) * (gain * ROTATION_GAIN / passed))
        else:
            gate = self.matrix(size, self.hidden)
            up = self.matrix(size, self.hidden)
            down = self.matrix(self.hidden, size, 2 * gain * NOISE)
        yield f"{prefix}gate_proj.weight", gate
        yield f"{prefix}up_proj.weight", up
        yield f"{prefix}down_proj.weight", down

    def joining(self, embedding_basis: torch.Tensor | None = None) -> torch.Tensor:
        """Return what an MTP layer applies to the embedding and the hidden state.

        They come in this order, normalized, as one vector.

        Args:
            embedding_basis: The basis of the draft's embedding, by default that of
                the target's.
        """
        hidden_half = HIDDEN_WEIGHT * torch.eye(self.hidden, dtype=torch.float64)
        return bf16(torch.cat([self.rotation(embedding_basis), hidden_half], dim=1))

    def joined_layers(self, layer: Callable[[str], NamedTensors]) -> NamedTensors:
        """Yield MTP layers behind one joining projection, all under ``mtp.``.

        Args:
            layer: Yields one layer, given the prefix of its tensors' names.
        """
        yield "mtp.fc.weight", self.joining()
        for index in range(self.mtp_layers):
            yield from layer(f"mtp.layers.{index}.")
        for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            yield f"mtp.{name}.weight", self.norm()

    def norm(self, size: int | None = None) -> torch.Tensor:
        """Return the weight of a norm that only normalizes.

        Args:
            size: Its size, by default the hidden size.
        """
        shape = (self.hidden if size is None else size,)
        return torch.full(shape, self.norm_weight, dtype=torch.bfloat16)

    def matrix(self, rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        """Return a random bfloat16 matrix that scales unit-size inputs by ``scale``."""
        values = torch.randn(rows, columns, generator=self.generator)
        return bf16(values * (scale / columns**0.5))

    def _coordinates(self, start: int, stop: int) -> torch.Tensor:
        """Return ``c(n)`` for a range of tokens: float32 of (tokens, hidden)."""
        tokens = torch.arange(start, stop, dtype=torch.float64)
        # Reduced before the (much cheaper) single-precision sine and cosine.
        phases = (tokens[:, None] * self.angles).remainder(2 * torch.pi).float()
        coordinates = torch.cat([phases.cos(), phases.sin()], dim=1)
        return coordinates * self.amplitudes.float().repeat(2)

    def rotation(
        self,
        embedding_basis: torch.Tensor | None = None,
        head_basis: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the map from embedding row ``n`` to the direction of ``n + 1``.

        The result is float64 of (hidden, hidden) and leads from the embedding's
        basis to the LM head's. It removes the component shared by all rows.

        Args:
            embedding_basis: The former basis, by default the target's.
            head_basis: The latter basis, by default the target's.
        """
        if embedding_basis is None:
            embedding_basis = self.embedding_basis
        if head_basis is None:
            head_basis = self.head_basis
        keep = torch.ones_like(self.angles)
        keep[0] = 0.0
        cos, sin = (keep * self.angles.cos()).diag(), (keep * self.angles.sin()).diag()
        turn = torch.cat([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)])
        return head_basis @ turn @ embedding_basis.T

    def orthogonal(self) -> torch.Tensor:
        """Return a random orthogonal float64 matrix of (hidden, hidden)."""
        shape = (self.hidden, self.hidden)
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        orthogonal: torch.Tensor = torch.linalg.qr(values).Q
        return orthogonal


def bf16(values: torch.Tensor) -> torch.Tensor:
    """Return values as bfloat16, laid out as safetensors wants them."""
    return values.to(torch.bfloat16).contiguous()


def save_tensors(
    path: Path,
    rest: dict[str, torch.Tensor],
    tables: dict[str, torch.Tensor],
    shards: Shards,
) -> None:
    """Write the tensors into one file, or tables into shards of their own.

    Args:
        path: An existing directory.
        rest: All tensors but the tables, by their names.
        tables: The vocabulary tables.
        shards: ``single`` or ``tables``.
    """
    if shards == "single":
        save_file({**tables, **rest}, path / "model.safetensors", {"format": "pt"})
        return
    parts = [*({name: table} for name, table in tables.items()), rest]
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05}-of-{len(parts):05}.safetensors"
        save_file(part, path / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(t.nbytes for part in parts for t in part.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    file = "model.safetensors.index.json"
    (path / file).write_text(json.dumps(index, indent=2) + "\n")
