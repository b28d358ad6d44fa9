# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Qwen3.5 MTP drafts hold no vocabulary tables of their own at PP=1."""

import json
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vllm.config import (
    ModelConfig,
    ParallelConfig,
    SpeculativeConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import ModelRegistry, qwen3_5, qwen3_5_mtp
from vllm.model_executor.models.deferred_vocab import (
    DeferredLMHead,
    DeferredVocabEmbedding,
)
from vllm.model_executor.models.interns2_mobius import InternS2MobiusMTP
from vllm.model_executor.models.qwen3_5_mtp import Qwen3_5MoeMTP, Qwen3_5MTP

VOCAB = 131_072
HIDDEN = 64
# Far above everything else in the draft, and below a table packed to 4 bits.
VOCABULARY_SIZED = VOCAB * HIDDEN // 4

DRAFTS = [Qwen3_5MTP, Qwen3_5MoeMTP, InternS2MobiusMTP]
# Names of both tables in text-only and in multimodal checkpoints.
TABLE_NAMES = [
    ("model.embed_tokens", "lm_head"),
    ("model.language_model.embed_tokens", "lm_head"),
]

all_drafts = pytest.mark.parametrize("draft_class", DRAFTS)
tied_and_untied = pytest.mark.parametrize("tied", [False, True])
all_table_names = pytest.mark.parametrize(("embedding", "head"), TABLE_NAMES)


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    """Run the tests as the only rank, with the classes inspected in this process."""
    store = tmp_path_factory.mktemp("rendezvous") / "store"
    with patch.dict(ModelRegistry.models):
        for model in (
            qwen3_5.Qwen3_5ForCausalLM,
            qwen3_5.Qwen3_5MoeForCausalLM,
            qwen3_5.Qwen3_5MoeForConditionalGeneration,
            Qwen3_5MTP,
            Qwen3_5MoeMTP,
        ):
            ModelRegistry.register_model(model.__name__, model)
        try:
            with set_current_vllm_config(VllmConfig()):
                init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
                initialize_model_parallel()
            yield
        finally:
            cleanup_dist_env_and_memory()


@pytest.fixture
def build(tmp_path):
    """Return a function that builds a draft as the model loader does."""

    def build(draft_class: type, tied: bool = False) -> torch.nn.Module:
        moe = issubclass(draft_class, Qwen3_5MoeMTP)
        config = {
            "architectures": [f"Qwen3_5{'Moe' if moe else ''}ForCausalLM"],
            "model_type": f"qwen3_5{'_moe' if moe else ''}_text",
            "dtype": "bfloat16",
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "num_hidden_layers": 1,
            "layer_types": ["full_attention"],
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "max_position_embeddings": 128,
            "mtp_num_hidden_layers": 1,
            "tie_word_embeddings": tied,
        }
        if moe:
            config["num_experts"] = 2
            config["num_experts_per_tok"] = 1
            config["moe_intermediate_size"] = HIDDEN
            config["shared_expert_intermediate_size"] = HIDDEN
        else:
            config["intermediate_size"] = HIDDEN
        if draft_class is InternS2MobiusMTP:
            # It is built from a multimodal config only.
            config = {
                "architectures": ["Qwen3_5MoeForConditionalGeneration"],
                "model_type": "qwen3_5_moe",
                "text_config": config,
                "dtype": "bfloat16",
                "tie_word_embeddings": tied,
            }
        (tmp_path / "config.json").write_text(json.dumps(config))

        target_config = ModelConfig(
            model=str(tmp_path), skip_tokenizer_init=True, enforce_eager=True
        )
        speculative_config = SpeculativeConfig(
            method="mtp",
            num_speculative_tokens=1,
            target_model_config=target_config,
            target_parallel_config=ParallelConfig(),
        )
        vllm_config = VllmConfig(
            model_config=target_config, speculative_config=speculative_config
        )
        default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(target_config.dtype)
        try:
            return initialize_model(
                vllm_config,
                model_class=draft_class,
                model_config=speculative_config.draft_model_config,
            )
        finally:
            torch.set_default_dtype(default_dtype)

    return build


@pytest.fixture
def two_stages(monkeypatch):
    """Make the drafts believe that they are built on the last of two stages."""
    group = SimpleNamespace(
        world_size=2, rank_in_group=1, is_first_rank=False, is_last_rank=True
    )
    monkeypatch.setattr(qwen3_5_mtp, "get_pp_group", lambda: group)


class LargestStorage(TorchDispatchMode):
    """Records the size of the largest storage that any operation returned."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                self.nbytes = max(self.nbytes, leaf.untyped_storage().nbytes())
        return result


def draft_weights(draft_class: type) -> dict[str, torch.Tensor]:
    """Return the draft's own tensors of a checkpoint, each filled with its number."""
    shapes = {
        "fc": (HIDDEN, 2 * HIDDEN),
        "norm": (HIDDEN,),
        "pre_fc_norm_embedding": (HIDDEN,),
        "pre_fc_norm_hidden": (HIDDEN,),
        "layers.0.input_layernorm": (HIDDEN,),
        "layers.0.post_attention_layernorm": (HIDDEN,),
        "layers.0.self_attn.q_proj": (256, HIDDEN),
        "layers.0.self_attn.k_proj": (64, HIDDEN),
        "layers.0.self_attn.v_proj": (64, HIDDEN),
        "layers.0.self_attn.o_proj": (HIDDEN, 128),
        "layers.0.self_attn.q_norm": (64,),
        "layers.0.self_attn.k_norm": (64,),
    }
    mlps = ["layers.0.mlp"]
    if issubclass(draft_class, Qwen3_5MoeMTP):
        shapes["layers.0.mlp.gate"] = (2, HIDDEN)
        shapes["layers.0.mlp.shared_expert_gate"] = (1, HIDDEN)
        parts = ("shared_expert", "experts.0", "experts.1")
        mlps = [f"layers.0.mlp.{part}" for part in parts]
    for mlp in mlps:
        for projection in ("gate_proj", "up_proj", "down_proj"):
            shapes[f"{mlp}.{projection}"] = (HIDDEN, HIDDEN)
    return {
        f"mtp.{name}.weight": torch.full(shape, number, dtype=torch.bfloat16)
        for number, (name, shape) in enumerate(shapes.items(), 1)
    }


def tables(embedding: str, head: str) -> dict[str, torch.Tensor]:
    """Return the vocabulary tables of a checkpoint."""
    return {
        f"{name}.weight": torch.full((VOCAB, HIDDEN), value, dtype=torch.bfloat16)
        for name, value in ((embedding, -1.0), (head, -2.0))
    }


@all_drafts
@tied_and_untied
def test_no_table_is_allocated_in_building_and_loading(build, draft_class, tied):
    weights = draft_weights(draft_class) | tables(*TABLE_NAMES[0])

    with LargestStorage() as largest:
        draft = build(draft_class, tied)
        draft.load_weights(weights.items())

    assert type(draft) is draft_class
    assert type(draft.model.embed_tokens) is DeferredVocabEmbedding
    assert type(draft.lm_head) is DeferredLMHead
    assert 0 < largest.nbytes < VOCABULARY_SIZED
    for name, parameter in draft.named_parameters():
        assert parameter.shape[0] < VOCAB, name


@all_drafts
@tied_and_untied
def test_tables_are_allocated_under_pp(build, two_stages, draft_class, tied):
    with LargestStorage() as largest:
        draft = build(draft_class, tied)

    assert type(draft.model.embed_tokens) is VocabParallelEmbedding
    assert type(draft.lm_head) is ParallelLMHead
    assert (draft.lm_head.weight is draft.model.embed_tokens.weight) == tied
    # The recorder that finds no table without PP does find them here.
    assert largest.nbytes == VOCAB * HIDDEN * 2


@all_table_names
@tied_and_untied
def test_both_tables_are_loaded_under_pp(build, two_stages, embedding, head, tied):
    draft = build(Qwen3_5MTP, tied)
    weights = draft_weights(Qwen3_5MTP) | tables(embedding, head)
    if tied:
        del weights[f"{head}.weight"]

    assert not any(draft.is_unused_checkpoint_weight(name) for name in weights)
    loaded = draft.load_weights(weights.items())

    assert loaded == {name for name, _ in draft.named_parameters()}
    assert torch.all(draft.model.embed_tokens.weight == -1)
    assert torch.all(draft.lm_head.weight == (-1 if tied else -2))


@all_drafts
@all_table_names
def test_only_the_tensors_of_the_draft_are_loaded(build, draft_class, embedding, head):
    draft = build(draft_class)
    weights = draft_weights(draft_class)
    unused = tables(embedding, head)
    for name in (embedding, head):
        unused[f"{name}.weight_scale"] = torch.ones(VOCAB, 1)
        unused[f"{name}.weight_packed"] = torch.ones(VOCAB, 8, dtype=torch.int32)

    assert all(draft.is_unused_checkpoint_weight(name) for name in unused)
    assert not any(draft.is_unused_checkpoint_weight(name) for name in weights)
    loaded = draft.load_weights((unused | weights).items())

    assert loaded == {name for name, _ in draft.named_parameters()}
    for name in ("fc", "norm", "layers.0.self_attn.o_proj"):
        expected = weights[f"mtp.{name}.weight"]
        assert torch.equal(draft.model.get_submodule(name).weight, expected), name


@all_table_names
def test_attached_modules_are_loaded_into(build, monkeypatch, embedding, head):
    draft = build(Qwen3_5MTP)
    with monkeypatch.context() as pipeline:
        group = SimpleNamespace(world_size=2, is_last_rank=True)
        pipeline.setattr(qwen3_5_mtp, "get_pp_group", lambda: group)
        target = build(Qwen3_5MTP)
    names = tables(embedding, head)

    del draft.model.embed_tokens
    draft.model.embed_tokens = target.model.embed_tokens
    assert not draft.is_unused_checkpoint_weight(f"{embedding}.weight")
    assert draft.is_unused_checkpoint_weight(f"{head}.weight")

    del draft.lm_head
    draft.lm_head = target.lm_head
    assert not any(draft.is_unused_checkpoint_weight(name) for name in names)

    loaded = draft.load_weights(names.items())
    assert loaded == {"model.embed_tokens.weight", "lm_head.weight"}
    assert torch.all(target.model.embed_tokens.weight == -1)
    assert torch.all(target.lm_head.weight == -2)


@all_table_names
def test_tensors_of_the_target_alone_stay_unused(build, embedding, head):
    prefix = embedding.removesuffix("embed_tokens")
    draft = build(Qwen3_5MTP)

    for name in ("layers.0.self_attn.q_proj.weight", "norm.weight"):
        assert draft.is_unused_checkpoint_weight(prefix + name)


@all_drafts
def test_use_before_attachment_is_refused(build, draft_class):
    draft = build(draft_class)
    hidden_states = torch.zeros(1, HIDDEN, dtype=torch.bfloat16)

    for use in (draft.compute_logits, draft.get_top_tokens):
        with pytest.raises(RuntimeError, match=r"lm_head \(DeferredLMHead\)"):
            use(hidden_states)
    with pytest.raises(RuntimeError, match="embed_tokens .DeferredVocabEmbedding"):
        draft.embed_input_ids(torch.zeros(1, dtype=torch.long))
