# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Placeholders for a draft's vocabulary modules, and the check that none is left."""

import copy
import inspect
import logging
import pickle
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import nn

from vllm.config import LoadConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.base_loader import _has_online_quant
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.model_executor.models import deferred_vocab
from vllm.model_executor.models.deferred_vocab import (
    DeferredLMHead,
    DeferredVocabEmbedding,
    check_attached,
    deferred_modules,
    defers_vocab,
    draft_embedding,
    draft_lm_head,
    is_deferred,
    skip_deferred_weights,
)
from vllm.model_executor.models.utils import AutoWeightsLoader
from vllm.model_inspection import format_model_inspection
from vllm.v1.spec_decode import llm_base_proposer
from vllm.v1.worker.gpu.spec_decode.eagle import utils as eagle_utils
from vllm.v1.worker.worker_base import WorkerWrapperBase

HIDDEN = 32
# In float32 these are tables of 0.5 and 1 MiB.
EMBEDDING_ROWS = 4096
HEAD_ROWS = 8192

PLACEHOLDERS = [
    (DeferredVocabEmbedding, VocabParallelEmbedding),
    (DeferredLMHead, ParallelLMHead),
]


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    """Run the tests as the only rank, under a default config."""
    store = tmp_path_factory.mktemp("rendezvous") / "store"
    with set_current_vllm_config(VllmConfig()):
        try:
            init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
            initialize_model_parallel()
            yield
        finally:
            cleanup_dist_env_and_memory()


class Messages(logging.Handler):
    """Keeps what is logged: vLLM's loggers needn't propagate to pytest's handlers."""

    def __init__(self):
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def logged():
    """Return what deferred_vocab.py logs at level INFO and above."""
    logger = logging.getLogger(deferred_vocab.__name__)
    level, messages = logger.level, Messages()
    logger.addHandler(messages)
    logger.setLevel(logging.INFO)
    yield messages.texts
    logger.setLevel(level)
    logger.removeHandler(messages)


class Draft(nn.Module):
    """The parts of a draft that its loaders and its proposer look at."""

    def __init__(self, num_shared_heads: int = 0):
        super().__init__()
        self.fc = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.model = nn.Module()
        self.model.embed_tokens = DeferredVocabEmbedding(prefix="model.embed_tokens")
        self.model.layers = nn.ModuleDict()
        for index in range(num_shared_heads):
            layer = self.model.layers[str(index)] = nn.Module()
            layer.shared_head = nn.Module()
            layer.shared_head.head = DeferredLMHead(prefix=f"layers.{index}.head")
        self.lm_head = DeferredLMHead(prefix="lm_head")


class Target(nn.Module):
    def __init__(self, has_lm_head: bool = True):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(EMBEDDING_ROWS, HIDDEN)
        if has_lm_head:
            self.lm_head = nn.Linear(HIDDEN, HEAD_ROWS, bias=False)


def checkpoint() -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of a small checkpoint that Draft may be given."""
    return [
        ("fc.weight", torch.full((HIDDEN, HIDDEN), 2.0)),
        ("lm_head.weight", torch.full((HEAD_ROWS, HIDDEN), 3.0)),
        ("lm_head.weight_scale", torch.ones(HEAD_ROWS)),
        ("lm_head.bias", torch.ones(HEAD_ROWS)),
        ("model.embed_tokens.weight", torch.full((EMBEDDING_ROWS, HIDDEN), 4.0)),
        ("model.embed_tokens.weight_scale", torch.ones(EMBEDDING_ROWS)),
    ]


@pytest.mark.parametrize(("placeholder", "real"), PLACEHOLDERS)
def test_placeholder_is_built_like_the_real_module_and_holds_nothing(placeholder, real):
    keywords = dict.fromkeys(inspect.signature(real).parameters)
    module = placeholder(**keywords | {"prefix": "model.table"})
    positional = placeholder(EMBEDDING_ROWS, HIDDEN, torch.float16)

    for built in (module, positional, module.to(torch.bfloat16).eval()):
        assert not list(built.parameters())
        assert not list(built.buffers())
        assert not built.state_dict()
    assert "model.table" in module.message


@pytest.mark.parametrize(("placeholder", "real"), PLACEHOLDERS)
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))]
)
def test_placeholder_survives_deepcopy_and_pickle(placeholder, real, duplicate):
    copied = duplicate(placeholder(prefix="model.table"))

    assert type(copied) is placeholder
    assert not copied.state_dict()
    with pytest.raises(RuntimeError, match=r"model\.table"):
        copied(torch.zeros(1, dtype=torch.long))


def test_checkpoint_tensors_go_by_until_a_real_module_is_attached():
    draft = Draft()
    tensors = checkpoint()

    assert AutoWeightsLoader(draft).load_weights(tensors) == {"fc.weight"}
    assert torch.all(draft.fc.weight == 2.0)

    del draft.lm_head
    draft.lm_head = ParallelLMHead(HEAD_ROWS, HIDDEN, params_dtype=torch.float32)
    plain = [(name, t) for name, t in tensors if not name.endswith("_scale")]
    assert AutoWeightsLoader(draft).load_weights(plain) == {
        "fc.weight",
        "lm_head.weight",
    }
    assert torch.all(draft.lm_head.weight == 3.0)

    del draft.model.embed_tokens
    draft.model.embed_tokens = nn.Embedding(EMBEDDING_ROWS, HIDDEN)
    assert "model.embed_tokens.weight" in AutoWeightsLoader(draft).load_weights(plain)
    assert torch.all(draft.model.embed_tokens.weight == 4.0)


def names_after_skipping(draft: nn.Module, names: list[str]) -> list[str]:
    tensor = torch.zeros(1)
    return [
        name for name, _ in skip_deferred_weights(draft, ((n, tensor) for n in names))
    ]


def test_loops_that_look_up_parameters_see_no_tensor_of_a_placeholder():
    draft = Draft(num_shared_heads=2)
    own = ["model.fc.weight", "model.layers.0.shared_head.norm.weight", "lm_heads.bias"]
    heads = [
        "lm_head.weight",
        "layers.0.shared_head.head.weight",
        "lm_head.weight_scale",
    ]
    embeddings = ["model.embed_tokens.weight", "model.layers.0.embed_tokens.qweight"]
    names = own + heads + embeddings

    assert names_after_skipping(draft, names) == own

    draft.model.embed_tokens = Target().model.embed_tokens
    assert names_after_skipping(draft, names) == own + embeddings

    # As long as one head is missing.
    draft.lm_head = draft.model.layers["1"].shared_head.head = Target().lm_head
    assert names_after_skipping(draft, names) == own + embeddings
    draft.model.layers["0"].shared_head.head = draft.lm_head
    assert names_after_skipping(draft, names) == names


@pytest.mark.parametrize(("placeholder", "real"), PLACEHOLDERS)
def test_placeholder_can_be_looked_at(placeholder, real):
    module = placeholder(prefix="model.table")

    assert not hasattr(module, "weight")
    assert getattr(module, "bias", None) is None
    method = getattr(module, "quant_method", None)
    assert method is not None
    assert not isinstance(method, QuantizeMethodBase)


def test_draft_with_placeholders_survives_loading():
    draft = Draft(num_shared_heads=2)
    placeholders = deferred_modules(draft)
    draft.fc.weight.data.fill_(torch.nan)

    record_metadata_for_reloading(draft)
    DummyModelLoader(LoadConfig(load_format="dummy")).load_weights(draft, None)
    assert not _has_online_quant(draft)
    model_config = SimpleNamespace(
        dtype=torch.float32,
        quantization=None,
        word_embeddings_untied_by_checkpoint=True,
    )
    process_weights_after_loading(draft, model_config, draft.fc.weight.device)

    assert "(lm_head): DeferredLMHead(" in format_model_inspection(draft)
    assert torch.all(draft.fc.weight.isfinite())
    assert [name for name, _ in draft.named_parameters()] == ["fc.weight"]
    assert deferred_modules(draft) == placeholders


def use_as_module(placeholder):
    return placeholder(torch.zeros(1, dtype=torch.long))


def use_to_embed(placeholder):
    return placeholder.quant_method.embedding(placeholder, torch.zeros(1))


def use_to_project(placeholder):
    return placeholder.quant_method.apply(placeholder, torch.zeros(1), bias=None)


def use_for_logits(placeholder):
    return LogitsProcessor(HEAD_ROWS)(placeholder, torch.zeros(1, HIDDEN))


def use_for_top_tokens(placeholder):
    processor = LogitsProcessor(HEAD_ROWS)
    return processor.get_top_tokens(placeholder, torch.zeros(1, HIDDEN))


@pytest.mark.parametrize(
    ("placeholder", "use"),
    [
        (DeferredVocabEmbedding, use_as_module),
        (DeferredVocabEmbedding, use_to_embed),
        (DeferredLMHead, use_as_module),
        (DeferredLMHead, use_to_project),
        (DeferredLMHead, use_for_logits),
        (DeferredLMHead, use_for_top_tokens),
    ],
)
def test_use_before_attachment_says_what_is_missing(placeholder, use):
    with pytest.raises(RuntimeError) as error:
        use(placeholder(prefix="model.table"))

    message = str(error.value)
    assert message.startswith(f"model.table ({placeholder.__name__})")
    assert "before the target's module was attached" in message
    assert deferred_vocab.REMEDY in message


def test_missing_attribute_says_why_it_is_missing():
    with pytest.raises(AttributeError, match=r"'weight'.*lm_head \(DeferredLMHead\)"):
        _ = DeferredLMHead(prefix="lm_head").weight


def test_tables_are_deferred_without_pipeline_parallelism_only():
    one_stage, two_stages = (SimpleNamespace(world_size=size) for size in (1, 2))

    for maybe_defer, (placeholder, real) in zip(
        (draft_embedding, draft_lm_head), PLACEHOLDERS, strict=True
    ):
        assert maybe_defer(real, one_stage) is placeholder
        assert maybe_defer(real, two_stages) is real
    assert defers_vocab(one_stage) and not defers_vocab(two_stages)


@pytest.mark.parametrize("named_for", ["target", "draft"])
@pytest.mark.parametrize(
    ("load_format", "defers"),
    [
        ("auto", True),
        ("dummy", True),
        # They look up each tensor of a checkpoint in the draft's state.
        ("sharded_state", False),
        ("runai_streamer_sharded", False),
        ("tensorizer", False),
    ],
)
def test_loader_that_wants_every_tensor_gets_tables(named_for, load_format, defers):
    config = VllmConfig()
    named = LoadConfig(load_format=load_format)
    if named_for == "target":
        config.load_config = named
    else:
        config.speculative_config = SimpleNamespace(draft_load_config=named)

    with set_current_vllm_config(config):
        assert defers_vocab(SimpleNamespace(world_size=1)) is defers


def test_worker_does_not_start_with_a_placeholder_left(monkeypatch):
    """Whoever loads the draft: the worker and its proposer may be a platform's own."""
    started: list[Any] = []
    worker = SimpleNamespace(initialize_from_config=started.append)
    wrapper: Any = WorkerWrapperBase(rpc_rank=0)
    wrapper.worker, wrapper.vllm_config = worker, VllmConfig()
    monkeypatch.setattr(deferred_vocab, "_placeholders", WeakSet())
    draft, target = Draft(), Target()
    draft.model.embed_tokens = target.model.embed_tokens

    with pytest.raises(RuntimeError) as error:
        wrapper.initialize_from_config(["cache"])

    message = str(error.value)
    assert "lm_head (DeferredLMHead)" in message and "embed_tokens" not in message
    assert deferred_vocab.REMEDY in message and not started
    del error
    draft.lm_head = target.lm_head
    wrapper.initialize_from_config(["cache"])
    assert started == ["cache"]


def test_worker_starts_whoever_holds_on_to_a_replaced_placeholder(monkeypatch):
    started: list[Any] = []
    wrapper: Any = WorkerWrapperBase(rpc_rank=0)
    wrapper.worker = SimpleNamespace(initialize_from_config=started.append)
    wrapper.vllm_config = VllmConfig()
    monkeypatch.setattr(deferred_vocab, "_placeholders", WeakSet())
    draft, target = Draft(), Target()
    held = draft.lm_head
    draft.model.embed_tokens = target.model.embed_tokens
    draft.lm_head = target.lm_head

    check_attached(draft, ["model.embed_tokens", "lm_head"])
    wrapper.initialize_from_config(["cache"])

    assert started == ["cache"] and isinstance(held, DeferredLMHead)


def test_placeholders_are_found_under_every_name():
    draft = Draft()
    draft.model.layers["0"] = nn.Module()
    draft.model.layers["0"].head = draft.lm_head

    assert set(deferred_modules(draft)) == {
        "model.embed_tokens",
        "model.layers.0.head",
        "lm_head",
    }
    assert is_deferred(draft, "embed_tokens") and is_deferred(draft, "lm_head")
    assert not is_deferred(draft, "fc") and not is_deferred(draft, "tokens")
    draft.lm_head = nn.Linear(HIDDEN, HEAD_ROWS)
    assert not is_deferred(draft, "lm_head") and is_deferred(draft, "head")


def test_check_names_every_placeholder_that_is_left(logged):
    draft = Draft(num_shared_heads=1)
    deferred = deferred_modules(draft)
    draft.model.embed_tokens = Target().model.embed_tokens

    with pytest.raises(RuntimeError) as error:
        check_attached(draft, deferred)

    message = str(error.value)
    assert message.startswith("Draft: ") and deferred_vocab.REMEDY in message
    assert "model.layers.0.shared_head.head, lm_head" in message
    assert "embed_tokens" not in message
    assert not logged


@pytest.mark.parametrize("attached", [None, "absent"])
def test_check_names_what_is_no_module(attached):
    draft = Draft()
    deferred = deferred_modules(draft)
    draft.model.embed_tokens = Target().model.embed_tokens
    del draft.lm_head
    if attached is None:
        draft.register_module("lm_head", None)

    with pytest.raises(RuntimeError, match="Draft: lm_head was left unallocated"):
        check_attached(draft, deferred)


def load_with_legacy_runner(monkeypatch, draft, target):
    monkeypatch.setattr(
        llm_base_proposer, "get_layers_from_vllm_config", lambda *args, **kwargs: {}
    )
    proposer = object.__new__(llm_base_proposer.SpecDecodeBaseProposer)
    proposer.vllm_config = SimpleNamespace(speculative_config=None)
    proposer.supports_mm_inputs = False
    proposer.parallel_drafting = False
    proposer.use_local_argmax_reduction = False
    monkeypatch.setattr(proposer, "_get_model", lambda: draft)
    proposer.load_model(target)
    assert proposer.model is draft


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
    assert eagle_utils.load_eagle_model(target, vllm_config) is draft


both_runners = pytest.mark.parametrize(
    "load", [load_with_legacy_runner, load_with_v2_runner]
)


@both_runners
@pytest.mark.parametrize("num_shared_heads", [0, 2])
def test_runner_attaches_the_target_and_logs_what_was_saved(
    monkeypatch, logged, load, num_shared_heads
):
    draft, target = Draft(num_shared_heads), Target()
    names = deferred_modules(draft)

    load(monkeypatch, draft, target)

    assert draft.model.embed_tokens is target.model.embed_tokens
    assert draft.lm_head is target.lm_head
    for layer in draft.model.layers.values():
        assert layer.shared_head.head is target.lm_head
    (line,) = logged
    assert len(names) == 2 + num_shared_heads
    assert f"{1.5 + num_shared_heads:.1f} MiB not allocated" in line
    for name in names:
        mib = draft.get_submodule(name).weight.nbytes / 2**20
        assert f"{name} {mib:.1f} MiB" in line


@both_runners
def test_runner_refuses_a_target_without_a_head(monkeypatch, logged, load):
    with pytest.raises(RuntimeError, match=r"Draft: lm_head was left unallocated"):
        load(monkeypatch, Draft(), Target(has_lm_head=False))
    assert not logged


@both_runners
def test_runner_refuses_a_deferred_embedding_under_pp(monkeypatch, logged, load):
    for module in (llm_base_proposer, eagle_utils):
        monkeypatch.setattr(
            module, "get_pp_group", lambda: SimpleNamespace(world_size=2)
        )

    with pytest.raises(RuntimeError, match=r"Draft: model\.embed_tokens was left"):
        load(monkeypatch, Draft(), Target())
    assert not logged


@both_runners
def test_runner_leaves_a_draft_with_modules_of_its_own_alone(monkeypatch, logged, load):
    draft, own = Draft(), Target()
    draft.has_own_embed_tokens = draft.has_own_lm_head = True
    draft.model.embed_tokens, draft.lm_head = own.model.embed_tokens, own.lm_head

    load(monkeypatch, draft, Target())

    assert draft.model.embed_tokens is own.model.embed_tokens
    assert draft.lm_head is own.lm_head
    assert not logged
