# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Qwen3.5's vocabulary embeddings may be quantized, the target's and the draft's."""

import json
from copy import deepcopy
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from vllm.config import (
    ModelConfig,
    ParallelConfig,
    SpeculativeConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.config.quantization import resolve_quantization_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import (
    QUANTIZATION_METHODS,
    get_quantization_config,
)
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.quantization.online.base import (
    OnlineQuantizationConfig,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import (
    ModelRegistry,
    interns2_mobius,
    quantized_vocab,
    qwen3_5,
    qwen3_5_mtp,
)
from vllm.model_executor.utils import set_weight_attrs

# Not a multiple of what tables are padded to.
VOCAB = 200
HIDDEN = 64

TEXT = qwen3_5.Qwen3_5ForCausalLM
MULTIMODAL = qwen3_5.Qwen3_5ForConditionalGeneration
MOE_TEXT = qwen3_5.Qwen3_5MoeForCausalLM
MOE_MULTIMODAL = qwen3_5.Qwen3_5MoeForConditionalGeneration
MOBIUS = interns2_mobius.InternS2MobiusForConditionalGeneration
TARGETS = [TEXT, MULTIMODAL, MOE_TEXT, MOE_MULTIMODAL, MOBIUS]

# Each draft with the targets that it is for.
DRAFTS = [
    (qwen3_5_mtp.Qwen3_5MTP, TEXT),
    (qwen3_5_mtp.Qwen3_5MTP, MULTIMODAL),
    (qwen3_5_mtp.Qwen3_5MoeMTP, MOE_TEXT),
    (qwen3_5_mtp.Qwen3_5MoeMTP, MOE_MULTIMODAL),
    (interns2_mobius.InternS2MobiusMTP, MOBIUS),
]


def by_name(value: object) -> str | None:
    return value.__name__ if isinstance(value, type) else None


all_drafts = pytest.mark.parametrize(("draft_class", "target"), DRAFTS, ids=by_name)
all_models = pytest.mark.parametrize(
    ("model_class", "target"),
    [*((target, target) for target in TARGETS), *DRAFTS],
    ids=by_name,
)


def is_multimodal(target: type) -> bool:
    return target.__name__.endswith("ForConditionalGeneration")


def embedding_name(target: type) -> str:
    prefix = "language_model." if is_multimodal(target) else ""
    return f"{prefix}model.embed_tokens"


def checkpoint_config(target: type, tied: bool) -> dict[str, object]:
    """Return the `config.json` of a tiny checkpoint."""
    moe = target in (MOE_TEXT, MOE_MULTIMODAL, MOBIUS)
    model_type = f"qwen3_5{'_moe' if moe else ''}"
    sizes = ("moe_intermediate_size", "shared_expert_intermediate_size")
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "num_blocks": 1}
    common = {
        "architectures": [target.__name__],
        "dtype": "bfloat16",
        "tie_word_embeddings": tied,
    }
    text = {
        **common,
        "model_type": f"{model_type}_text",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": 128,
        "mtp_num_hidden_layers": 1,
        **dict.fromkeys(sizes if moe else ["intermediate_size"], HIDDEN),
        **(experts if moe else {}),
    }
    if not is_multimodal(target):
        return text
    vision = {
        "model_type": model_type,
        "depth": 1,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": HIDDEN,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [],
    }
    parts = {"text_config": text, "vision_config": vision}
    return {**common, "model_type": model_type, **parts}


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    """Run the tests as the only rank, with the classes inspected in this process."""
    store = tmp_path_factory.mktemp("rendezvous") / "store"
    with patch.dict(ModelRegistry.models), set_current_vllm_config(VllmConfig()):
        for model in {*TARGETS, *(draft for draft, _ in DRAFTS)}:
            ModelRegistry.register_model(model.__name__, model)
        try:
            init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
            initialize_model_parallel()
            yield
        finally:
            cleanup_dist_env_and_memory()


@pytest.fixture(autouse=True)
def two_stages(monkeypatch):
    """Build drafts as on the last of two stages: there each has its own table."""
    group = SimpleNamespace(
        world_size=2, rank_in_group=1, is_first_rank=False, is_last_rank=True
    )
    monkeypatch.setattr(qwen3_5_mtp, "get_pp_group", lambda: group)


@pytest.fixture
def build(tmp_path):
    """Return a function that builds a target or a draft as the model loader does."""

    def build(
        model_class: type,
        target: type,
        quant_config: QuantizationConfig | None = None,
        tied: bool = False,
    ) -> nn.Module:
        config = checkpoint_config(target, tied)
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
        vllm_config.quant_config = quant_config
        if model_class is target:
            model_config = target_config
        else:
            model_config = speculative_config.draft_model_config
        default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            return initialize_model(
                vllm_config, model_class=model_class, model_config=model_config
            )
        finally:
            torch.set_default_dtype(default_dtype)

    return build


@pytest.fixture
def warned(monkeypatch):
    """Return a list of the warnings about embeddings, which grows."""
    messages: list[str] = []
    logger = quantized_vocab.logger
    monkeypatch.setattr(logger, "warning", lambda m, *args: messages.append(m % args))
    return messages


def tables(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Return a model's embedding and its head."""
    language_model = getattr(model, "language_model", model)
    return language_model.model.embed_tokens, language_model.lm_head


class NoLookup(QuantizeMethodBase):
    """Int8 rows, each with a scale, that can't be looked up."""

    def create_weights(
        self, layer, width, partitions, *args, params_dtype, weight_loader, **kwargs
    ):
        weight = torch.empty(sum(partitions), width, dtype=torch.int8)
        scale = torch.empty(sum(partitions), 1, dtype=params_dtype)
        for name, tensor in (("weight", weight), ("weight_scale", scale)):
            parameter = nn.Parameter(tensor, requires_grad=False)
            attributes = {"output_dim": 0, "weight_loader": weight_loader}
            set_weight_attrs(parameter, attributes)
            layer.register_parameter(name, parameter)

    def apply(self, layer, x, bias=None):
        return x @ (layer.weight * layer.weight_scale).T


class Int8Rows(NoLookup):
    def embedding(self, layer, input_):
        return layer.weight[input_] * layer.weight_scale[input_]


class Int8Head(Int8Rows):
    def tie_weights(self, layer, embed_tokens):
        return embed_tokens


class Recorder(QuantizationConfig):
    """Records who asks, and answers embeddings and heads as it is told to."""

    def __init__(self, embedding=None, head=None):
        super().__init__()
        self.embedding = embedding
        self.head = head
        self.asked: list[tuple[type, str]] = []

    def get_quant_method(self, layer, prefix):
        self.asked.append((type(layer), prefix))
        if isinstance(layer, LinearBase):
            return UnquantizedLinearMethod()
        if isinstance(layer, ParallelLMHead):
            return self.head
        if not isinstance(layer, VocabParallelEmbedding):
            return None
        if isinstance(self.embedding, Exception):
            raise self.embedding
        return self.embedding

    def get_name(self):
        return "recorder"

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


def load_names(target: type) -> list[str]:
    """Return the names that the table has in checkpoints for a target."""
    names = ["model.language_model.embed_tokens"]
    return names if is_multimodal(target) else ["model.embed_tokens", *names]


def load(model: nn.Module, target: type, name: str, **tensors: torch.Tensor) -> None:
    """Load a table, and check that all of it has found its place."""
    loaded = model.load_weights((f"{name}.{k}", v) for k, v in tensors.items())

    of_target = type(model) is target
    embedding = embedding_name(target) if of_target else "model.embed_tokens"
    assert loaded == {f"{embedding}.{key}" for key in tensors}


def int8_table() -> dict[str, torch.Tensor]:
    weight = torch.randint(-128, 128, (VOCAB, HIDDEN), dtype=torch.int8)
    return {"weight": weight, "weight_scale": torch.rand(VOCAB, 1).bfloat16()}


def check_bf16(model: nn.Module, target: type) -> None:
    """Check that the table of a model is as if the model had no quantization."""
    embedding, _ = tables(model)
    assert type(embedding.quant_method) is UnquantizedEmbeddingMethod
    for name in load_names(target):
        weight = torch.randn(VOCAB, HIDDEN).bfloat16()
        load(model, target, name, weight=weight)
        assert embedding.weight.dtype == torch.bfloat16
        assert torch.equal(embedding.weight[:VOCAB], weight)
        assert torch.equal(embedding(torch.arange(VOCAB)), weight)


@all_models
@pytest.mark.parametrize(
    "answer", [None, UnquantizedLinearMethod()], ids=["none", "skipped"]
)
def test_the_embedding_asks_once_by_the_targets_name(
    build, warned, model_class, target, answer
):
    quant_config = Recorder(answer)

    model = build(model_class, target, quant_config)

    assert type(model) is model_class
    embedding, head = tables(model)
    assert type(embedding) is VocabParallelEmbedding
    tables_asked = (VocabParallelEmbedding, ParallelLMHead)
    assert [ask for ask in quant_config.asked if ask[0] in tables_asked] == [
        (VocabParallelEmbedding, embedding_name(target)),
        (ParallelLMHead, head.prefix),
    ]
    assert not warned
    check_bf16(model, target)


def test_a_draft_without_a_target_asks_by_its_own_name():
    model_config = SimpleNamespace(architecture="Qwen3_5MTP")
    alone = SimpleNamespace(speculative_config=None, model_config=model_config)

    name = quantized_vocab.target_embedding_name(alone)

    assert name == "model.embed_tokens"


@all_models
def test_a_quantized_table_is_loaded_and_looked_up(build, warned, model_class, target):
    model = build(model_class, target, Recorder(Int8Rows()))
    embedding, head = tables(model)

    assert type(embedding.quant_method) is Int8Rows
    assert type(head.quant_method) is UnquantizedEmbeddingMethod
    assert not warned
    for name in load_names(target):
        table = int8_table()
        load(model, target, name, **table)
        for key, expected in table.items():
            parameter = embedding.get_parameter(key)
            assert parameter.dtype == expected.dtype
            assert torch.equal(parameter[:VOCAB], expected)
        rows = model.embed_input_ids(torch.arange(VOCAB))
        assert torch.equal(rows, table["weight"] * table["weight_scale"])


@all_models
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (NoLookup(), "NoLookup"),
        (NotImplementedError("no tables"), "no tables"),
        (ValueError("integers only"), "integers only"),
    ],
    ids=["method", "not_implemented", "value"],
)
def test_a_refused_table_stays_unquantized(
    build, warned, model_class, target, answer, reason
):
    model = build(model_class, target, Recorder(answer))

    [message] = warned
    assert message.startswith(f"{embedding_name(target)} stays unquantized (recorder)")
    assert reason in message
    check_bf16(model, target)


@pytest.mark.parametrize(("model_class", "target"), [(TEXT, TEXT), DRAFTS[0]])
def test_other_errors_are_not_hidden(build, warned, model_class, target):
    with pytest.raises(RuntimeError, match="out of luck"):
        build(model_class, target, Recorder(RuntimeError("out of luck")))
    assert not warned


INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}


def compressed_tensors(
    kind: dict[str, object], targets: list[str], *ignore: str
) -> dict[str, object]:
    form = f"{kind['type']}-quantized"
    group = {
        "targets": targets,
        "weights": kind | {"strategy": "channel", "dynamic": False},
        "input_activations": kind | {"strategy": "token", "dynamic": True},
    }
    return {"format": form, "config_groups": {"0": group}, "ignore": list(ignore)}


@pytest.fixture
def build_both(build):
    """Return a function that builds a target, then its draft, with one config."""

    def build_both(
        draft_class: type, target: type, config: dict[str, object]
    ) -> list[nn.Module]:
        config_class = get_quantization_config("compressed-tensors")
        quant_config = config_class.from_config(config)
        return [build(model, target, quant_config) for model in (target, draft_class)]

    return build_both


@pytest.mark.parametrize(("draft_class", "target"), DRAFTS[:2], ids=by_name)
def test_linear_layers_alone_are_quantized(build_both, warned, draft_class, target):
    config = compressed_tensors(INT8, ["Linear"], "lm_head", "re:.*visual.*")

    models = build_both(draft_class, target, config)

    assert not warned
    for model in models:
        modules = dict(model.named_modules())
        [projection] = (modules[name] for name in modules if name.endswith("o_proj"))
        assert projection.weight.dtype == torch.int8
        check_bf16(model, target)


@all_drafts
def test_an_ignored_table_is_found_by_its_name(build_both, warned, draft_class, target):
    for name in load_names(target):
        config = compressed_tensors(FP8, ["VocabParallelEmbedding"], name)
        models = build_both(draft_class, target, config)
        assert not warned
        for model in models:
            check_bf16(model, target)


@all_drafts
def test_a_float_scheme_leaves_the_table_alone(build_both, warned, draft_class, target):
    config = compressed_tensors(FP8, ["re:.*embed_tokens"])

    models = build_both(draft_class, target, config)

    assert len(warned) == 2
    for model, message in zip(models, warned):
        assert message.startswith(f"{embedding_name(target)} stays unquantized")
        assert "only support weight-only INT" in message
        check_bf16(model, target)


@all_drafts
@pytest.mark.parametrize("packed", [False, True])
def test_a_packed_scheme_follows_the_checkpoint(
    tmp_path, build_both, warned, draft_class, target, packed
):
    name = load_names(target)[-1]
    tensors = {f"{name}.weight": torch.zeros(VOCAB, HIDDEN, dtype=torch.bfloat16)}
    if packed:
        tensors = {
            f"{name}.weight_packed": torch.zeros(VOCAB, HIDDEN // 4, dtype=torch.int32)
        }
    save_file(tensors, tmp_path / "model.safetensors")
    config = compressed_tensors(INT8, ["re:.*embed_tokens"])

    models = build_both(draft_class, target, config)

    if packed:
        assert not warned
        for model in models:
            embedding, _ = tables(model)
            assert {name for name, _ in embedding.named_parameters()} == {
                "weight_packed",
                "weight_scale",
                "weight_shape",
            }
        return
    assert len(warned) == 2
    for model, message in zip(models, warned):
        assert message.startswith(f"{embedding_name(target)} stays unquantized")
        assert "so it is in the checkpoint" in message
        check_bf16(model, target)


@all_models
def test_an_unquantized_table_is_tied(build, model_class, target):
    for quant_config in (None, Recorder(), Recorder(NoLookup())):
        model = build(model_class, target, quant_config, tied=True)
        embedding, head = tables(model)
        assert type(head) is ParallelLMHead
        assert head.weight is embedding.weight
        check_bf16(model, target)


@all_models
@pytest.mark.parametrize("head", [None, Int8Rows()], ids=["unquantized", "int8"])
def test_a_head_that_cannot_use_the_table_is_refused(build, model_class, target, head):
    in_language_model = model_class is target and is_multimodal(target)
    name = f"{'language_model.' if in_language_model else ''}lm_head"
    method = "Int8Rows" if head else "UnquantizedEmbeddingMethod"
    refusal = (
        f"{name} is tied to {embedding_name(target)}, but {method} can't use its "
        "quantized table (Int8Rows)."
    )

    with pytest.raises(ValueError) as error:
        build(model_class, target, Recorder(Int8Rows(), head), tied=True)
    assert str(error.value).startswith(refusal)
    build(model_class, target, Recorder(Int8Rows(), head))


@all_models
def test_a_head_that_is_the_embedding(build, model_class, target):
    model = build(model_class, target, Recorder(Int8Rows(), Int8Head()), tied=True)
    embedding, head = tables(model)

    assert head is embedding
    table = int8_table()
    load(model, target, "model.language_model.embed_tokens", **table)
    logits = model.compute_logits(torch.eye(HIDDEN).bfloat16())
    assert torch.equal(logits.T, table["weight"] * table["weight_scale"])


AWQ: dict[str, object] = {"bits": 4, "group_size": 128, "zero_point": True}
GPTQ: dict[str, object] = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "sym": True,
}
GPTQ |= {"desc_act": False, "lm_head": False}
FP_QUANT: dict[str, object] = {
    "hadamard_group_size": 32,
    "modules_to_not_convert": ["lm_head"],
}
FP_QUANT |= {"forward_dtype": "mxfp4", "forward_method": "abs_max"}
BLOCK_FP8: dict[str, object] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCK_FP8 |= {"weight_block_size": [128, 128]}
STATIC_FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
QUARK = {
    "global_quant_config": {"weight": STATIC_FP8, "input_tensors": STATIC_FP8},
    "layer_quant_config": {},
    "layer_type_quant_config": {},
    "export": {"kv_cache_group": [], "pack_method": "reorder"},
    "exclude": ["lm_head"],
}
PER_ROW = {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}
TORCHAO = {
    "_type": "Int8WeightOnlyConfig",
    "_version": 2,
    "_data": {"group_size": None, "granularity": PER_ROW, "set_inductor_config": True},
}


def modelopt(algorithm: str, **more: object) -> dict[str, object]:
    config = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "group_size": 16}
    return {"quantization": {**config, "exclude_modules": ["lm_head"], **more}}


NVFP4_LAYER = {"model.layers.0.mlp.down_proj": {"quant_algo": "NVFP4"}}
# What checkpoints with quantized linear layers have.
LINEAR_ONLY: dict[str, dict[str, object]] = {
    **dict.fromkeys(("awq", "auto_awq", "awq_marlin"), AWQ),
    **dict.fromkeys(("gptq", "auto_gptq", "gptq_marlin", "moe_wna16", "humming"), GPTQ),
    **dict.fromkeys(("fp8", "deepseek_v4_fp8"), BLOCK_FP8),
    **dict.fromkeys(("mxfp4", "gpt_oss_mxfp4", "experts_int8"), {}),
    **dict.fromkeys(("modelopt_mxfp8", "mxfp8"), modelopt("MXFP8")),
    "modelopt": modelopt("FP8"),
    "modelopt_fp4": modelopt("NVFP4"),
    "modelopt_mixed": modelopt("MIXED_PRECISION", quantized_layers=NVFP4_LAYER),
    "compressed-tensors": compressed_tensors(INT8, ["Linear"], "lm_head"),
    "fbgemm_fp8": {"activation_scale_ub": 1200.0, "modules_to_not_convert": []},
    "fp_quant": FP_QUANT,
    "quark": QUARK,
    "torchao": {"quant_type": {"default": TORCHAO}},
    "inc": {"bits": 4, "group_size": 128, "sym": True},
}


@pytest.mark.parametrize("method", QUANTIZATION_METHODS)
def test_methods_for_linear_layers_leave_the_table_alone(warned, method):
    config_class = get_quantization_config(method)
    try:
        if method in LINEAR_ONLY:
            quant_config = config_class.from_config(deepcopy(LINEAR_ONLY[method]))
        elif config_class is OnlineQuantizationConfig:
            layers = {"targets": {"re:.*_proj": "fp8_per_tensor"}}
            options = (None, layers) if method == "online" else (method, None)
            quant_config = config_class(args=resolve_quantization_config(*options))
        else:
            pytest.skip("what its checkpoints have is not known here")
        embedding_config = quantized_vocab.for_embedding(quant_config)
        assert embedding_config is not None
        for name in map(embedding_name, (TEXT, MULTIMODAL)):
            layer = VocabParallelEmbedding(
                VOCAB, HIDDEN, quant_config=embedding_config, prefix=name
            )
            assert embedding_config.get_quant_method(layer, name) is None
            assert type(layer.quant_method) is UnquantizedEmbeddingMethod
    except ImportError as error:
        pytest.skip(f"needs a package: {error}")
    assert not warned
