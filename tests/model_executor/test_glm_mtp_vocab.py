# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""GLM MTP drafts hold no vocabulary tables of their own at PP=1."""

import importlib
import json
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vllm.config import (
    LoadConfig,
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
from vllm.model_executor.layers import mla
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.deepseek_mtp import SharedHead
from vllm.model_executor.models.deferred_vocab import (
    DeferredLMHead,
    DeferredVocabEmbedding,
    deferred_modules,
)
from vllm.model_executor.models.glm4_moe import Glm4MoeForCausalLM
from vllm.model_executor.models.glm4_moe_lite import Glm4MoeLiteForCausalLM
from vllm.model_executor.models.glm4_moe_lite_mtp import Glm4MoeLiteMTP
from vllm.model_executor.models.glm4_moe_mtp import Glm4MoeMTP
from vllm.model_executor.models.glm_ocr import GlmOcrForConditionalGeneration
from vllm.model_executor.models.glm_ocr_mtp import GlmOcrMTP
from vllm.v1.spec_decode import llm_base_proposer
from vllm.v1.worker.gpu.spec_decode.eagle import utils as eagle_utils

try:
    glm5next = importlib.import_module("vllm.models.glm5next.common")
except ModuleNotFoundError:
    glm5next = importlib.import_module("vllm.models.glm5next.nvidia")
Glm5NextMTP = importlib.import_module(f"{glm5next.__name__}.mtp").Glm5NextMTP
Glm5NextForCausalLM = importlib.import_module(
    f"{glm5next.__name__}.model"
).Glm5NextForCausalLM

VOCAB = 131_072
HIDDEN = 64
# Far above everything else in the draft, and below a table packed to 4 bits.
VOCABULARY_SIZED = VOCAB * HIDDEN // 4
# The first MTP layer: the targets have one layer.
FIRST = 1

COMMON = {
    "dtype": "bfloat16",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": FIRST,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
EXPERTS = {
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": HIDDEN,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
LATENT_ATTENTION = {
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
INDEXED_ATTENTION = {
    "qk_rope_head_dim": 0,
    "mla_use_nope": True,
    "mla_nope": True,
    "index_topk": 64,
    "index_head_dim": 128,
    "index_n_heads": 2,
    "index_kpool": 16,
    "indexer_rope_interleave": True,
    "layer_types": ["indexed_attention"],
    "mlp_layer_types": ["sparse"],
    "mhc": False,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "swiglu_limit": 10.0,
}
CONFIGS = {
    Glm4MoeMTP: {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "attention_bias": False,
        **COMMON,
        **EXPERTS,
    },
    Glm4MoeLiteMTP: {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        **COMMON,
        **EXPERTS,
        **LATENT_ATTENTION,
    },
    GlmOcrMTP: {
        "architectures": ["GlmOcrForConditionalGeneration"],
        "model_type": "glm_ocr",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "text_config": {"model_type": "glm_ocr_text", **COMMON},
    },
    Glm5NextMTP: {
        "architectures": ["Glm5NextForCausalLM"],
        "model_type": "glm5_next",
        **COMMON,
        **EXPERTS,
        **LATENT_ATTENTION,
        **INDEXED_ATTENTION,
    },
}
DRAFTS = list(CONFIGS)
# vLLM leaves this draft's head out under pipeline parallelism, too.
HEAD_DEFERRED_UNDER_PP = [Glm5NextMTP] if "common" in glm5next.__name__ else []

all_drafts = pytest.mark.parametrize("draft_class", DRAFTS)
one_and_two_layers = pytest.mark.parametrize("num_layers", [1, 2])


class NoAttention(nn.Module):
    """Stands in for the sparse attention, which has no backend on every platform."""

    def __init__(self, *, prefix="", **kwargs):
        super().__init__()
        self.layer_name = prefix


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    """Run the tests as the only rank, with the classes inspected in this process."""
    store = tmp_path_factory.mktemp("rendezvous") / "store"
    models = [
        Glm4MoeForCausalLM,
        Glm4MoeLiteForCausalLM,
        GlmOcrForConditionalGeneration,
        Glm5NextForCausalLM,
        *DRAFTS,
    ]
    with (
        patch.dict(ModelRegistry.models),
        patch.object(mla, "MLAAttention", NoAttention),
        set_current_vllm_config(VllmConfig()),
    ):
        for model in models:
            name = f"{model.__name__}{'Model' if model in DRAFTS else ''}"
            ModelRegistry.register_model(name, model)
        try:
            init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
            initialize_model_parallel()
            yield
        finally:
            cleanup_dist_env_and_memory()


class AskedFor(QuantizationConfig):
    """Quantizes nothing, and records the names of the layers that ask it."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def get_name(self):
        return "asked_for"

    def get_supported_act_dtypes(self):
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls):
        return 0

    @staticmethod
    def get_config_filenames():
        return []

    @classmethod
    def from_config(cls, config):
        return cls()

    def get_quant_method(self, layer, prefix):
        self.names.append(prefix)
        if isinstance(layer, LinearBase):
            return UnquantizedLinearMethod()
        if isinstance(layer, VocabParallelEmbedding):
            return UnquantizedEmbeddingMethod()
        return None


@pytest.fixture
def build(tmp_path):
    """Return a function that builds a draft as the model loader does."""

    def build(
        draft_class: type,
        num_layers: int = 1,
        quant_config: QuantizationConfig | None = None,
    ) -> nn.Module:
        config = json.loads(json.dumps(CONFIGS[draft_class]))
        config.get("text_config", config)["num_nextn_predict_layers"] = num_layers
        (tmp_path / "config.json").write_text(json.dumps(config))

        target_config = ModelConfig(
            model=str(tmp_path), skip_tokenizer_init=True, enforce_eager=True
        )
        speculative_config = SpeculativeConfig(
            method="mtp",
            num_speculative_tokens=num_layers,
            target_model_config=target_config,
            target_parallel_config=ParallelConfig(),
        )
        vllm_config = VllmConfig(
            model_config=target_config, speculative_config=speculative_config
        )
        vllm_config.quant_config = quant_config
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
    for draft_class in DRAFTS:
        module = importlib.import_module(draft_class.__module__)
        monkeypatch.setattr(module, "get_pp_group", lambda: group)


class LargestStorage(TorchDispatchMode):
    """Records the size of the largest storage that any operation returned."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                self.nbytes = max(self.nbytes, leaf.untyped_storage().nbytes())
        return result


def shared_heads(draft: nn.Module) -> list[nn.Module]:
    return [layer.shared_head for layer in draft.model.layers.values()]


def own_weights(num_layers: int) -> dict[str, torch.Tensor]:
    """Return those tensors of MTP layers that all drafts have, each with a number."""
    shapes = {
        "enorm": (HIDDEN,),
        "hnorm": (HIDDEN,),
        "eh_proj": (HIDDEN, 2 * HIDDEN),
        "shared_head.norm": (HIDDEN,),
    }
    return {
        f"model.layers.{FIRST + layer}.{name}.weight": torch.full(
            shape, 10.0 * layer + number, dtype=torch.bfloat16
        )
        for layer in range(num_layers)
        for number, (name, shape) in enumerate(shapes.items(), 1)
    }


def tables(num_layers: int, suffix: str = "weight") -> dict[str, torch.Tensor]:
    """Return the target's vocabulary tables, and the copies that MTP layers bring."""
    names = ["model.embed_tokens", "lm_head"]
    for layer in range(num_layers):
        prefix = f"model.layers.{FIRST + layer}"
        names += [f"{prefix}.embed_tokens", f"{prefix}.shared_head.head"]
    return {
        f"{name}.{suffix}": torch.full(
            (VOCAB, HIDDEN), -1.0 if "embed" in name else -2.0, dtype=torch.bfloat16
        )
        for name in names
    }


def target_with_tables() -> nn.Module:
    target = nn.Module()
    target.model = nn.Module()
    target.model.embed_tokens = VocabParallelEmbedding(VOCAB, HIDDEN)
    target.lm_head = ParallelLMHead(VOCAB, HIDDEN)
    return target


# ---------------------------------------------------------------------- SharedHead

HEAD_CONFIG = SimpleNamespace(vocab_size=VOCAB, hidden_size=HIDDEN, rms_norm_eps=1e-6)


def test_shared_head_has_a_head_of_its_own_by_default():
    quant_config = AskedFor()

    head = SharedHead(HEAD_CONFIG, "layers.1", quant_config)

    assert type(head.head) is ParallelLMHead
    assert head.head.weight.shape == (VOCAB, HIDDEN)
    assert quant_config.names == ["layers.1.head"]
    assert {name for name, _ in head.named_parameters()} == {
        "norm.weight",
        "head.weight",
    }


def test_deferred_head_has_no_parameters():
    quant_config = AskedFor()

    with LargestStorage() as largest:
        head = SharedHead(HEAD_CONFIG, "layers.1", quant_config, defer_lm_head=True)

    assert type(head.head) is DeferredLMHead
    assert not quant_config.names
    assert set(head.state_dict()) == {"norm.weight"}
    assert largest.nbytes < VOCABULARY_SIZED
    hidden_states = torch.ones(1, HIDDEN)
    assert head(hidden_states).shape == hidden_states.shape


def test_deferred_head_is_refused_by_the_logits_processor():
    head = SharedHead(HEAD_CONFIG, "layers.1", defer_lm_head=True).head
    processor, hidden_states = LogitsProcessor(VOCAB), torch.zeros(1, HIDDEN)

    for use in (processor, processor.get_top_tokens):
        with pytest.raises(RuntimeError, match=r"layers\.1\.head \(DeferredLMHead\)"):
            use(head, hidden_states)


# -------------------------------------------------------------------------- drafts


@all_drafts
@one_and_two_layers
def test_no_table_is_allocated_in_building_and_loading(build, draft_class, num_layers):
    own = own_weights(num_layers)
    weights = own | tables(num_layers)
    quant_config = AskedFor()

    with LargestStorage() as largest:
        draft = build(draft_class, num_layers, quant_config)
        loaded = draft.load_weights(weights.items())

    assert type(draft) is draft_class
    assert type(draft.model.embed_tokens) is DeferredVocabEmbedding
    assert len(shared_heads(draft)) == num_layers
    assert all(type(head.head) is DeferredLMHead for head in shared_heads(draft))
    assert 0 < largest.nbytes < VOCABULARY_SIZED
    assert quant_config.names
    assert not [n for n in quant_config.names if n.endswith(("head", "embed_tokens"))]
    assert loaded == set(own)
    for name, expected in own.items():
        assert torch.equal(draft.get_parameter(name), expected), name


@all_drafts
@pytest.mark.parametrize(
    "suffix", ["weight_scale", "weight_scale_2", "weight_scale_inv", "input_scale"]
)
def test_scales_beside_a_table_go_by(build, draft_class, suffix):
    own = own_weights(1)

    loaded = build(draft_class).load_weights((tables(1, suffix) | own).items())

    assert loaded == set(own)


@all_drafts
def test_tables_are_allocated_and_loaded_under_pp(build, two_stages, draft_class):
    quant_config = AskedFor()
    with LargestStorage() as largest:
        draft = build(draft_class, quant_config=quant_config)
    loaded = draft.load_weights((own_weights(1) | tables(1)).items())

    assert type(draft.model.embed_tokens) is VocabParallelEmbedding
    assert largest.nbytes == VOCAB * HIDDEN * 2
    assert torch.all(draft.model.embed_tokens.weight == -1)
    expected = set(own_weights(1)) | {"model.embed_tokens.weight"}
    [head] = (shared_head.head for shared_head in shared_heads(draft))
    if draft_class in HEAD_DEFERRED_UNDER_PP:
        assert type(head) is DeferredLMHead
    else:
        assert type(head) is ParallelLMHead
        assert torch.all(head.weight == -2)
        assert [n for n in quant_config.names if n.endswith("head")]
        expected.add(f"model.layers.{FIRST}.shared_head.head.weight")
    assert loaded == expected


def test_the_language_model_of_a_multimodal_checkpoint(build):
    own, unused = (
        {name.replace("model.", "model.language_model."): t for name, t in part.items()}
        for part in (own_weights(1), tables(1))
    )
    for draft_class in (GlmOcrMTP, Glm5NextMTP):
        loaded = build(draft_class).load_weights((own | unused).items())
        assert loaded == set(own_weights(1))


@all_drafts
def test_use_before_attachment_is_refused(build, draft_class):
    draft = build(draft_class)
    hidden_states = torch.zeros(1, HIDDEN, dtype=torch.bfloat16)

    with pytest.raises(RuntimeError, match=r"\.head \(DeferredLMHead\)"):
        draft.compute_logits(hidden_states)
    with pytest.raises(RuntimeError, match="embed_tokens .DeferredVocabEmbedding"):
        draft.embed_input_ids(torch.zeros(1, dtype=torch.long))


def load_with_legacy_runner(monkeypatch, draft, target):
    monkeypatch.setattr(
        llm_base_proposer, "get_layers_from_vllm_config", lambda *args, **kwargs: {}
    )
    proposer = object.__new__(llm_base_proposer.SpecDecodeBaseProposer)
    proposer.vllm_config = SimpleNamespace(speculative_config=None)
    proposer.supports_mm_inputs = False
    proposer.parallel_drafting = False
    proposer.use_local_argmax_reduction = False
    proposer._get_model = lambda: draft
    proposer.load_model(target)


def load_with_v2_runner(monkeypatch, draft, target):
    monkeypatch.setattr(eagle_utils, "get_model", lambda **kwargs: draft)
    speculative_config = SimpleNamespace(
        draft_model_config=None,
        draft_load_config=None,
        draft_lm_head_quantization=None,
        apply_draft_overrides=lambda vllm_config: vllm_config,
    )
    vllm_config = SimpleNamespace(
        speculative_config=speculative_config, load_config=LoadConfig()
    )
    eagle_utils.load_eagle_model(target, vllm_config)


@all_drafts
@one_and_two_layers
@pytest.mark.parametrize("load", [load_with_legacy_runner, load_with_v2_runner])
def test_runners_attach_the_target(monkeypatch, build, draft_class, num_layers, load):
    draft, target = build(draft_class, num_layers), target_with_tables()

    load(monkeypatch, draft, target)

    assert not deferred_modules(draft)
    assert draft.model.embed_tokens is target.model.embed_tokens
    for shared_head in shared_heads(draft):
        assert shared_head.head is target.lm_head


@all_drafts
def test_attached_modules_are_loaded_into(monkeypatch, build, draft_class):
    draft, target = build(draft_class), target_with_tables()
    load_with_v2_runner(monkeypatch, draft, target)

    draft.load_weights((own_weights(1) | tables(1)).items())

    assert torch.all(target.model.embed_tokens.weight == -1)
    assert torch.all(target.lm_head.weight == -2)
