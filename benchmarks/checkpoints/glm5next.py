# SPDX-License-Identifier: Apache-2.0
"""GLM-5.3-Flash checkpoints (``glm5_next``), text-only or multimodal.

All their layers are what MTP layers are: indexed attention (sparse MLA) and a mixture
of experts. Layers of the other kind, linear attention (KDA), load on a CPU only from
vLLM 0.32 on.
"""

from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoints.counting import Layout, NamedTensors
from benchmarks.checkpoints.nextn import Q_LORA_RANK, NextnWeights
from benchmarks.checkpoints.vision import glm_tower, vision_sizes
from benchmarks.tokenizer import GLM5_NEXT

INDEX_HEADS = 4
INDEX_HEAD_DIM = 128
# The legacy proposer wants 32 times this to divide the KV block of 128 (vLLM 0.30).
INDEX_POOL = 4


def write_glm5next(
    path: Path,
    *,
    vocab_size: int,
    hidden_size: int,
    num_nextn_predict_layers: int = 1,
    mtp_tables: bool = True,
    layout: Layout = "text",
    seed: int = 0,
) -> None:
    """Write a GLM-5.3-Flash checkpoint with MTP layers into a directory.

    It is for loading alone. A CPU has no kernels for the indexed attention, so nothing
    shows whether it counts: take its weights for random ones.

    Args:
        path: Directory to write to; made if missing, files in it are overwritten.
        vocab_size: Rows of the vocabulary tables.
        hidden_size: Hidden size, a multiple of 64.
        num_nextn_predict_layers: Number of MTP layers.
        mtp_tables: Whether every MTP layer has copies of the target's vocabulary
            tables. Stock vLLM can't load those.
        layout: ``text`` for a text-only checkpoint (``model.*``), ``multimodal``
            for one with a vision tower (``model.language_model.*``). On the latter
            vLLM's legacy proposer, patched or not, raises an AttributeError about
            ``image_token_index``.
        seed: Seed of everything that is random.

    Raises:
        ValueError: If a size is not one that works.
    """
    weights = _Glm5Next(
        layout=layout,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_nextn_predict_layers=num_nextn_predict_layers,
        mtp_tables=mtp_tables,
        seed=seed,
    )
    weights.write(path)


class _Glm5Next(NextnWeights):
    """The tensors and the configuration of one checkpoint."""

    num_layers = 1
    dense_layers = 0
    rope_head_dim = 0
    processor = GLM5_NEXT

    def config(self) -> dict[str, Any]:
        if not self.multimodal:
            return {
                "architectures": ["Glm5NextForCausalLM"],
                "model_type": "glm5_next",
                **self._text_config(),
            }
        text = {"model_type": "glm5_next_text", **self._text_config()}
        vision = {
            "model_type": "glm5_next_vision",
            **vision_sizes(self.hidden),
            "projection_intermediate_size": self.hidden,
        }
        return {
            "architectures": ["Glm5NextForConditionalGeneration"],
            "model_type": "glm5_next",
            **self.with_vision(text, vision),
        }

    def _text_config(self) -> dict[str, Any]:
        """Return the part of the configuration that describes the language model."""
        return {
            **self.sizes(),
            **self.layer_sizes(),
            **self.expert_sizes(),
            **self.latent_attention_sizes(),
            "pad_token_id": 0,
            "layer_types": ["indexed_attention"] * self.num_layers,
            "mlp_layer_types": ["sparse"] * self.num_layers,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "mla_use_nope": True,
            "index_topk": 64,
            "index_n_heads": INDEX_HEADS,
            "index_head_dim": INDEX_HEAD_DIM,
            "index_kpool": INDEX_POOL,
            "index_kpool_always_select_tail": True,
            "indexer_rope_interleave": True,
            # vLLM 0.30 builds hyper-connections only where tilelang is installed; MTP
            # layers have none in any version.
            "mhc": False,
        }

    def target(self) -> NamedTensors:
        yield from super().target()
        if self.multimodal:
            yield from glm_tower(self.hidden, self.generator)

    def self_attention(self, prefix: str) -> NamedTensors:
        yield from self.latent_attention(prefix)
        yield from self._indexer(f"{prefix}indexer.")

    def _indexer(self, prefix: str) -> NamedTensors:
        """Yield what chooses the keys that a query attends to."""
        queries = self.matrix(INDEX_HEADS * INDEX_HEAD_DIM, Q_LORA_RANK)
        yield f"{prefix}wq_b.weight", queries
        yield f"{prefix}wk.weight", self.matrix(INDEX_HEAD_DIM, self.hidden)
        yield f"{prefix}weights_proj.weight", self.matrix(INDEX_HEADS, self.hidden)
        gate = self.matrix(INDEX_HEAD_DIM, self.hidden)
        yield f"{prefix}index_kpool_compress_gate", gate
        # Kept in single precision by vLLM.
        positions = self.matrix(INDEX_POOL, INDEX_HEAD_DIM).float()
        yield f"{prefix}index_kpool_compress_ape", positions
        yield f"{prefix}k_norm.weight", torch.ones(INDEX_HEAD_DIM)
        yield f"{prefix}k_norm.bias", torch.zeros(INDEX_HEAD_DIM)
