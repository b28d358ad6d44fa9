# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Vocabulary tables of a draft that are left unallocated: which, and until when."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from vllm.config import LoadConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.model_executor import model_loader
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader import base_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.model_executor.models import draft_vocab, qwen3_dflash, utils
from vllm.model_executor.models.deferred_vocab import check_attached, deferred_modules
from vllm.model_executor.models.draft_vocab import (
    announce,
    announce_from_proposer,
    announce_target,
    settle_vocab,
)
from vllm.model_executor.models.utils import AutoWeightsLoader
from vllm.v1.spec_decode import llm_base_proposer
from vllm.v1.spec_decode.dflash import DFlashProposer
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.spec_decode.gemma4 import Gemma4Proposer
from vllm.v1.spec_decode.step3p5 import Step3p5MTPProposer
from vllm.v1.worker.gpu.spec_decode.dflash import utils as dflash_utils
from vllm.v1.worker.gpu.spec_decode.dspark import utils as dspark_utils
from vllm.v1.worker.gpu.spec_decode.eagle import utils as eagle_utils

VOCAB, HIDDEN = 256, 64
TABLES = {"model.embed_tokens", "lm_head"}


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


class NeedsScales(UnquantizedEmbeddingMethod):
    """Like NVFP4: a scale that is never loaded is an error."""

    def create_weights(self, layer, *args, **kwargs):
        super().create_weights(layer, *args, **kwargs)
        scale = nn.Parameter(torch.full((1,), torch.nan), requires_grad=False)
        layer.register_parameter("weight_scale", scale)

    def process_weights_after_loading(self, layer):
        if torch.isnan(layer.weight_scale).any():
            raise RuntimeError("weight_scale was never loaded")


class QuantConfig(QuantizationConfig):
    def __init__(self, method):
        super().__init__()
        self.method = method

    def get_quant_method(self, layer, prefix):
        return self.method if isinstance(layer, ParallelLMHead) else None

    def get_name(self):
        return "test"

    def get_supported_act_dtypes(self):
        return [torch.float32]

    @classmethod
    def get_min_capability(cls):
        return 0

    @staticmethod
    def get_config_filenames():
        return []

    @classmethod
    def from_config(cls, config):
        return cls(None)


def embedding(vocab=VOCAB, hidden=HIDDEN, **kwargs):
    return VocabParallelEmbedding(vocab, hidden, **kwargs)


def lm_head(vocab=VOCAB, hidden=HIDDEN, **kwargs):
    return ParallelLMHead(vocab, hidden, **kwargs)


class Target(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = embedding()
        self.lm_head = lm_head()
        for value, parameter in enumerate(self.parameters()):
            parameter.data.fill_(value + 1)


class Draft(nn.Module):
    """The parts of a draft that its loaders and its proposer look at."""

    def __init__(self, quant_method=None, layers=0, tie=False):
        super().__init__()
        self.fc = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.model = nn.Module()
        self.model.embed_tokens = embedding()
        self.model.layers = nn.ModuleDict()
        for index in range(layers):
            layer = self.model.layers[str(index)] = nn.Module()
            layer.shared_head = nn.Module()
            layer.shared_head.head = lm_head()
        self.lm_head = lm_head(quant_config=quant_method and QuantConfig(quant_method))
        if tie:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)

    def load_weights(self, weights):
        return AutoWeightsLoader(self).load_weights(weights)


def config(load_format="auto", draft_load_format=None, **extra):
    draft = LoadConfig(load_format=draft_load_format) if draft_load_format else None
    return SimpleNamespace(
        load_config=LoadConfig(
            load_format=load_format, model_loader_extra_config=extra
        ),
        speculative_config=SimpleNamespace(draft_load_config=draft),
    )


def model_config(path="absent", quantization=None):
    return SimpleNamespace(
        model=str(path),
        revision=None,
        dtype=torch.float32,
        quantization=quantization,
        word_embeddings_untied_by_checkpoint=True,
    )


def built(
    make=Draft, tables=TABLES, vllm_config=None, path="absent", load=lambda draft: None
):
    """Build a draft under an announcement, and load it before that ends."""
    target = Target()
    with announce(
        target.model.embed_tokens if "model.embed_tokens" in tables else None,
        target.lm_head if "lm_head" in tables else None,
        vllm_config or config(),
    ):
        draft = make()
        settle_vocab(draft, model_config(path))
        load(draft)
    return draft


def checkpoint():
    tensors = {
        "fc.weight": torch.zeros(HIDDEN, HIDDEN),
        "lm_head.weight": torch.full((VOCAB, HIDDEN), 3.0),
        "model.embed_tokens.weight": torch.full((VOCAB, HIDDEN), 4.0),
    }
    return list(tensors.items())


def check_like_stock(draft, stock):
    """Check that parameters are those of a draft that was built on stock."""
    ours, theirs = (
        dict(model.named_parameters(remove_duplicate=False)) for model in (draft, stock)
    )
    assert list(ours) == list(theirs)
    for name, parameter in ours.items():
        other = theirs[name]
        assert type(parameter) is type(other) and parameter.device == other.device
        assert parameter.shape == other.shape and parameter.dtype == other.dtype
        assert vars(parameter).keys() == vars(other).keys()
        if hasattr(parameter, "weight_loader"):
            assert parameter.weight_loader.__self__ in draft.modules()


# ---------------------------------------------------------------- the announcement


def test_without_an_announcement_nothing_changes():
    draft = Draft()
    settle_vocab(draft, model_config())
    assert not deferred_modules(draft)
    draft = built(tables=())
    assert not deferred_modules(draft)
    check_like_stock(draft, Draft())


def test_announced_tables_hold_nothing():
    draft = built(lambda: Draft(layers=2))
    heads = {f"model.layers.{n}.shared_head.head" for n in range(2)}
    assert set(deferred_modules(draft)) == TABLES | heads
    assert not draft.fc.weight.is_meta
    # Everything but the storage is there.
    stock = Draft(layers=2)
    for name in deferred_modules(draft):
        weight, real = (m.get_submodule(name).weight for m in (draft, stock))
        assert weight.shape == real.shape and weight.dtype == real.dtype
        assert vars(weight).keys() == vars(real).keys()


@pytest.mark.parametrize("tables", [{"lm_head"}, {"model.embed_tokens"}])
def test_table_by_table(tables):
    draft = built(tables=tables)
    assert set(deferred_modules(draft)) == tables


def test_an_announcement_ends_with_an_error_too():
    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        built(fail)
    assert not embedding().weight.is_meta


@pytest.mark.parametrize("module", [embedding, lm_head])
@pytest.mark.parametrize("size", [(VOCAB // 2, HIDDEN), (VOCAB, HIDDEN * 2)])
def test_a_table_of_another_size_is_its_own(module, size):
    def build():
        draft = Draft()
        if module is embedding:
            draft.model.embed_tokens = embedding(*size)
        else:
            draft.lm_head = lm_head(*size)
        return draft

    own = {"model.embed_tokens" if module is embedding else "lm_head"}
    assert set(deferred_modules(built(build))) == TABLES - own


def test_pipeline_parallelism_is_as_it_was(monkeypatch):
    two_stages = SimpleNamespace(world_size=2)
    monkeypatch.setattr(draft_vocab, "get_pp_group", lambda: two_stages)
    check_like_stock(built(), Draft())


@pytest.mark.parametrize(
    ("formats", "deferred"),
    [
        (("auto",), True),
        (("dummy",), True),
        (("runai_streamer",), True),
        (("sharded_state",), False),
        (("ipc_cache",), False),
        (("tensorizer",), False),
        (("modelexpress",), False),
        (("of_a_plugin",), False),
        (("sharded_state", "auto"), True),
        (("auto", "sharded_state"), False),
    ],
)
def test_loaders(formats, deferred):
    draft = built(vllm_config=config(*formats))
    assert bool(deferred_modules(draft)) is deferred


# --------------------------------------------------------------- what is kept


def with_other_tables():
    draft = Draft()
    draft.model.ngram = nn.ModuleList([embedding(), embedding()])
    draft.model.head = lm_head()
    draft.model.layers["0"] = nn.Module()
    draft.model.layers["0"].embed_tokens = embedding()
    return draft


def with_an_alias():
    draft = Draft()
    draft.model.norm = nn.Module()
    draft.model.norm.table = draft.model.embed_tokens
    return draft


def with_a_weight_in_another_module():
    draft = Draft()
    draft.fc.weight = draft.lm_head.weight
    return draft


@pytest.mark.parametrize(
    ("make", "deferred"),
    [
        (with_other_tables, TABLES),
        (with_an_alias, {"lm_head"}),
        (with_a_weight_in_another_module, {"model.embed_tokens"}),
    ],
)
def test_only_what_is_replaced_is_left_out(make, deferred):
    draft, stock = built(make), make()
    assert set(deferred_modules(draft)) == deferred
    for model in (draft, stock):
        for name in deferred:
            del model.get_submodule(name).weight
    check_like_stock(draft, stock)


def test_a_kept_head_that_is_tied_gets_the_storage():
    draft = built(lambda: Draft(tie=True), {"model.embed_tokens"})
    assert not deferred_modules(draft)
    check_like_stock(draft, Draft(tie=True))
    assert draft.lm_head.weight is draft.model.embed_tokens.weight
    assert isinstance(draft.lm_head.quant_method, UnquantizedEmbeddingMethod)
    draft.load_weights(checkpoint()[::2])
    assert torch.all(draft.lm_head.weight == 4.0)

    both = built(lambda: Draft(tie=True))
    assert set(deferred_modules(both)) == TABLES


def test_what_a_method_initialises_is_initialised():
    draft = built(lambda: Draft(NeedsScales()), {"model.embed_tokens"})
    assert torch.isnan(draft.lm_head.weight_scale).all()
    head = built(lambda: flagged(Draft(NeedsScales()), has_own_lm_head=True)).lm_head
    assert not head.weight.is_meta and torch.isnan(head.weight_scale).all()


def test_online_quantization_allocates_itself():
    method = NeedsScales()
    method.uses_meta_device = True
    assert deferred_modules(built(lambda: Draft(method))) == ["model.embed_tokens"]


def flagged(draft, **flags):
    for name, value in flags.items():
        setattr(draft, name, value)
    return draft


OWN_HEAD, OWN_EMBEDDING = ["lm_head.weight"], ["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    ("flag", "tensors", "load_format", "deferred"),
    [
        (None, OWN_HEAD + OWN_EMBEDDING, "auto", TABLES),
        (True, [], "auto", set()),
        # Loading sets these where it sees a tensor.
        (False, [], "auto", TABLES),
        (False, OWN_HEAD, "auto", {"model.embed_tokens"}),
        (False, OWN_EMBEDDING, "auto", {"lm_head"}),
        (False, ["tok_embeddings.weight", "output.weight"], "auto", set()),
        (False, None, "auto", set()),
        (False, [], "pt", set()),
        (False, [], "runai_streamer", set()),
        (False, None, "dummy", TABLES),
    ],
)
def test_drafts_that_may_have_tables_of_their_own(
    flag, tensors, load_format, deferred, tmp_path
):
    if tensors is not None:
        names = ["fc.weight", *tensors]
        save_file({name: torch.zeros(1) for name in names}, tmp_path / "a.safetensors")

    def make():
        flags = {"has_own_embed_tokens": flag, "has_own_lm_head": flag}
        return flagged(Draft(), **(flags if flag is not None else {}))

    draft = built(make, vllm_config=config(load_format), path=tmp_path)
    assert set(deferred_modules(draft)) == deferred


def test_a_head_that_only_the_config_announces():
    def make():
        draft = flagged(Draft(), has_own_lm_head=False)
        draft.config = SimpleNamespace(has_own_lm_head=True)
        return draft

    draft = built(make, vllm_config=config("dummy"))
    assert deferred_modules(draft) == ["model.embed_tokens"]


def test_a_flag_that_is_set_against_the_names(tmp_path):
    save_file({"fc.weight": torch.zeros(1)}, tmp_path / "a.safetensors")

    def load(draft):
        draft.has_own_lm_head = True

    with pytest.raises(RuntimeError, match=r"Draft: the checkpoint has lm_head, which"):
        built(lambda: flagged(Draft(), has_own_lm_head=False), path=tmp_path, load=load)


# ------------------------------------------------- between building and attaching


def test_loading_passes_by():
    draft = built(lambda: Draft(NeedsScales()))
    loaded = draft.load_weights(checkpoint())
    assert {"lm_head.weight", "model.embed_tokens.weight"} < loaded
    DummyModelLoader(LoadConfig(load_format="dummy")).load_weights(draft, None)
    assert set(deferred_modules(draft)) == TABLES


def test_nothing_is_processed():
    draft = built(lambda: Draft(NeedsScales()))
    # An unloaded scale is no error, and tables aren't compared to tie them again.
    process_weights_after_loading(draft, model_config(), torch.device("cpu"))
    assert set(deferred_modules(draft)) == TABLES
    with pytest.raises(RuntimeError, match="never loaded"):
        process_weights_after_loading(
            Draft(NeedsScales()), model_config(), torch.device("cpu")
        )


@pytest.mark.parametrize("tables", [TABLES, ()])
def test_tracking_of_loaded_weights(tables):
    loader = DefaultModelLoader(LoadConfig())
    draft = built(tables=tables)
    loader.track_weights_loading(draft, {"fc.weight"})
    with pytest.raises(ValueError, match=r"fc\.weight"):
        loader.track_weights_loading(draft, set())


def test_use_before_attachment_says_what_is_missing():
    draft = built()
    ids, hidden = torch.zeros(1, dtype=torch.long), torch.zeros(1, HIDDEN)
    with pytest.raises(RuntimeError, match=r"^model\.embed_tokens was used before"):
        draft.model.embed_tokens(ids)
    with pytest.raises(RuntimeError, match=r"^lm_head was used before"):
        LogitsProcessor(VOCAB)(draft.lm_head, hidden)
    assert draft.lm_head.tie_weights(draft.model.embed_tokens) is draft.lm_head


UNREAD = [
    "lm_head.weight",
    "lm_head.weight_scale",
    "model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "model.layers.5.shared_head.head.weight",
]
READ = [
    "fc.weight",
    "model.embed_tokens_per_layer.weight",
    "model.layers.5.shared_head.norm.weight",
    "model.layers.5.head.weight",
]


def unread(draft):
    is_unused = getattr(draft, "is_unused_checkpoint_weight", lambda name: False)
    return [name for name in READ + UNREAD if is_unused(name)]


def test_files_of_tables_are_not_read_while_these_are_missing():
    seen = []
    draft = built(load=lambda draft: seen.extend(unread(draft)))
    assert seen == UNREAD
    assert unread(draft) == []


class KnowsUnused(Draft):
    def is_unused_checkpoint_weight(self, name):
        return name == "fc.weight"


@pytest.mark.parametrize(
    ("make", "vllm_config", "expected"),
    [
        (KnowsUnused, config(), ["fc.weight", *UNREAD]),
        (with_other_tables, config(), [n for n in UNREAD if "embed" not in n]),
        (lambda: flagged(Draft(), has_own_lm_head=True), config(), []),
        (Draft, config(enable_weights_track=True), []),
    ],
)
def test_files_that_are_read(make, vllm_config, expected):
    seen = []
    built(make, vllm_config=vllm_config, load=lambda d: seen.extend(unread(d)))
    assert seen == expected


# ------------------------------------------------------------------- who announces


class OfAPlugin(EagleProposer):
    pass


def announced_tables(context):
    with context:
        embed, head = embedding(), lm_head()
    names = ["model.embed_tokens"] * embed.weight.is_meta
    return {*names, *(["lm_head"] * head.weight.is_meta)}


@pytest.mark.parametrize(
    ("kind", "tables"),
    [
        (EagleProposer, TABLES),
        (DFlashProposer, TABLES),
        (Step3p5MTPProposer, {"model.embed_tokens"}),
        (Gemma4Proposer, set()),
        (DraftModelProposer, set()),
        (OfAPlugin, set()),
    ],
)
def test_a_proposer_announces_what_it_attaches(kind, tables):
    proposer = object.__new__(kind)
    proposer.vllm_config = config()
    assert announced_tables(announce_from_proposer(proposer, Target())) == tables


def wrapped(language_model):
    class Wrapper(nn.Module):
        supports_multimodal = True

        def __init__(self):
            super().__init__()
            self.inner = language_model
            self.lm_head = lm_head()

        def get_language_model(self):
            return self.inner

    return Wrapper()


def without_a_head():
    target = Target()
    del target.lm_head
    return target


@pytest.mark.parametrize(
    ("target", "legacy", "v2"),
    [
        (Target, TABLES, TABLES),
        (lambda: wrapped(Target()), TABLES, TABLES),
        (without_a_head, {"model.embed_tokens"}, {"model.embed_tokens"}),
        # Only V2 takes the wrapper's.
        (lambda: wrapped(without_a_head()), {"model.embed_tokens"}, TABLES),
        (nn.Module, set(), set()),
    ],
)
def test_a_target_has_what_is_announced(target, legacy, v2):
    proposer = object.__new__(EagleProposer)
    proposer.vllm_config = config()
    target = target()
    assert announced_tables(announce_from_proposer(proposer, target)) == legacy
    assert announced_tables(announce_target(target, config())) == v2


# ------------------------------------------------------------------- whole loads


def loads(monkeypatch, module, make):
    """Have `get_model` build with a loader's `create_model`."""

    def get_model(**kwargs):
        loader = DummyModelLoader(LoadConfig(load_format="dummy"))
        vllm_config = SimpleNamespace(quant_config=None)
        draft = loader.create_model(vllm_config, model_config())
        loader.load_weights(draft, model_config())
        process_weights_after_loading(draft, model_config(), torch.device("cpu"))
        return draft

    monkeypatch.setattr(base_loader, "initialize_model", lambda **kwargs: make())
    monkeypatch.setattr(module, "get_model", get_model)


def load_with_legacy_runner(monkeypatch, make, target):
    loads(monkeypatch, llm_base_proposer, make)
    for name, value in (
        ("get_layers_from_vllm_config", lambda *args, **kwargs: {}),
        ("get_draft_load_config", lambda *args: None),
    ):
        monkeypatch.setattr(llm_base_proposer, name, value, raising=False)
    proposer = object.__new__(EagleProposer)
    proposer.vllm_config = config("dummy")
    proposer.vllm_config.speculative_config.draft_model_config = SimpleNamespace(
        hf_config=None
    )
    proposer.speculative_config = proposer.vllm_config.speculative_config
    proposer._create_draft_vllm_config = lambda: None
    proposer.supports_mm_inputs = False
    proposer.parallel_drafting = False
    proposer.use_local_argmax_reduction = False
    proposer.load_model(target)
    return proposer.model


def load_with_v2_runner(monkeypatch, make, target, **options):
    loads(monkeypatch, eagle_utils, make)
    vllm_config = speculating()
    vars(vllm_config.speculative_config).update(options)
    return eagle_utils.load_eagle_model(target, vllm_config)


def load_dflash(monkeypatch, make, target):
    loads(monkeypatch, dflash_utils, make)
    monkeypatch.setattr(dflash_utils, "replace", lambda config, **changes: config)
    monkeypatch.setattr(qwen3_dflash, "dflash_has_any_non_causal", lambda config: True)
    return dflash_utils.load_dflash_model(target, speculating())


def load_dspark(monkeypatch, make, target):
    loads(monkeypatch, model_loader, make)
    for name, value in (
        ("replace", lambda config, **changes: config),
        ("_resolve_dspark_attention_backend", lambda *args: None),
        ("_get_dspark_parallel_config", lambda *args: None),
    ):
        monkeypatch.setattr(dspark_utils, name, value)
    monkeypatch.setattr(qwen3_dflash, "dflash_has_any_non_causal", lambda config: True)
    monkeypatch.setattr(utils, "get_draft_quant_config", lambda config: None)
    return dspark_utils.load_dspark_model(target, speculating())


def speculating():
    """Return a config with what the V2 runner's loaders ask for."""
    vllm_config = config("dummy")
    draft_model_config = SimpleNamespace(
        hf_config=SimpleNamespace(draft_vocab_size=None), get_vocab_size=lambda: VOCAB
    )
    for name, value in (
        ("draft_model_config", draft_model_config),
        ("draft_lm_head_quantization", None),
        ("attention_backend", None),
        ("kv_cache_dtype", None),
        ("draft_parallel_config", SimpleNamespace(tensor_parallel_size=1)),
        ("apply_draft_overrides", lambda vllm_config: vllm_config),
    ):
        setattr(vllm_config.speculative_config, name, value)
    vllm_config.attention_config = SimpleNamespace(backend=None)
    vllm_config.cache_config = vllm_config.parallel_config = None
    vllm_config.model_config = draft_model_config
    return vllm_config


both_runners = pytest.mark.parametrize(
    "load", [load_with_legacy_runner, load_with_v2_runner]
)
all_loaders = pytest.mark.parametrize(
    "load", [load_with_legacy_runner, load_with_v2_runner, load_dflash, load_dspark]
)


@all_loaders
def test_the_target_is_attached(monkeypatch, load):
    target, missing = Target(), []

    def make():
        # Heads of layers are attached by two of the loaders.
        layers = 2 if load in (load_with_legacy_runner, load_with_v2_runner) else 0
        draft = Draft(NeedsScales(), layers)
        draft.config = SimpleNamespace()
        missing.extend(deferred_modules(draft))
        return draft

    draft = load(monkeypatch, make, target)
    assert len(missing) == 2 + len(draft.model.layers)
    assert draft.model.embed_tokens is target.model.embed_tokens
    for head in (
        draft.lm_head,
        *(x.shared_head.head for x in draft.model.layers.values()),
    ):
        assert head is target.lm_head
    assert not deferred_modules(draft)


@all_loaders
def test_own_tables_are_left_alone(monkeypatch, load):
    own = {"has_own_embed_tokens": True, "has_own_lm_head": True}

    def make():
        draft = flagged(Draft(), **own)
        draft.config = SimpleNamespace()
        return draft

    check_like_stock(load(monkeypatch, make, Target()), Draft())


@pytest.mark.skipif(
    not hasattr(eagle_utils, "quantized_lm_head_copy"), reason="this vLLM has none"
)
def test_a_quantized_copy_of_the_targets_head(monkeypatch):
    # The copy is a head, too; nothing is announced when it is built.
    def copy(head, kind):
        copied.append(lm_head())
        return copied[0]

    copied: list[ParallelLMHead] = []
    monkeypatch.setattr(eagle_utils, "quantized_lm_head_copy", copy)
    draft = load_with_v2_runner(
        monkeypatch, Draft, Target(), draft_lm_head_quantization="fp8"
    )
    assert draft.lm_head is copied[0] and not draft.lm_head.weight.is_meta


@both_runners
def test_a_table_that_is_left_is_found(monkeypatch, load):
    def make():
        draft = Draft()
        draft.model.hidden = [draft.lm_head]  # no module, for what walks a draft
        return draft

    draft = load(monkeypatch, make, Target())
    check_attached(draft, list(TABLES))
    draft.later = draft.model.hidden[0]
    with pytest.raises(RuntimeError, match="Draft: later was left unallocated"):
        check_attached(draft, list(TABLES))
