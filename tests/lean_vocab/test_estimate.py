# SPDX-License-Identifier: Apache-2.0
"""The command `estimate`, on the real vLLM.

That it agrees with what loading does is shown for every draft class in
`test_draft_classes`, and with a serving engine's log in `test_engine`.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkpoints import write_eagle
from vllm_lean_vocab.series import SERIES

from .conftest import Result

SHAPE = Path(__file__).parents[2] / "benchmarks/shapes/qwen3_8_27b"
FULL = pytest.mark.full
NEW_CLASS = {"architectures": ["NewForCausalLM"]}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_attention_heads": 40,
}
EAGLE = {"method": "eagle", "num_speculative_tokens": 1}


@pytest.fixture(autouse=True)
def shared_cache(warm_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(warm_cache))


def write_config(folder: Path, **changes: Any) -> Path:
    """Write the config of the well-known shape with changes; None takes one out."""
    config = json.loads((SHAPE / "config.json").read_text()) | changes
    folder.mkdir(exist_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


def test_of_a_well_known_shape(command: Callable[..., Result]) -> None:
    result = command("estimate", SHAPE)
    assert result.code == 0 and not result.err
    first, _, *tables, saved, weights, on = result.out.splitlines()
    assert first.startswith(f"{SHAPE}: the draft is Qwen3_5MTP (vLLM ")
    assert [table.split() for table in tables] == [
        [name, "248,320", "x", "5,120", "bfloat16", "2,425.0", "deferred"]
        for name in ("model.embed_tokens", "lm_head")
    ]
    assert "4,850.0 of 4,850.0 MiB on each rank" in saved
    assert weights == "No weights are here that tell which tables the draft brings."
    assert on.endswith(": " + ", ".join(each.id for each in SERIES))


def test_of_a_cached_model_with_several_stages(
    command: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--an--id/snapshots/0"
    snapshot.mkdir(parents=True)
    write_config(snapshot)
    refs = tmp_path / "models--an--id/refs"
    refs.mkdir()
    (refs / "main").write_text("0")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    ranks = ("--tensor-parallel-size", 4, "--pipeline-parallel-size", 2)
    report = json.loads(command("estimate", "an/id", *ranks, "--json").out)
    assert report["not_allocated_mib"] == 0
    assert report["stock_mib"] == 2 * 2425 / 4
    for table in report["tables"]:
        assert not table["deferred"] and "pipeline parallelism" in table["reason"]


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        (True, "the checkpoint has the draft's own, embed_tokens.weight"),
        pytest.param(False, "whether the draft has its own depends on", marks=FULL),
    ],
)
def test_tables_that_a_draft_keeps(
    command: Callable[..., Result], tmp_path: Path, weights: bool, reason: str
) -> None:
    model = write_eagle(
        tmp_path / "model", vocab_size=512, hidden_size=256, embed_tokens="own"
    )
    assert model.draft is not None
    if not weights:
        for file in model.draft.glob("*.safetensors"):
            file.unlink()
    speculation = json.dumps(EAGLE | {"model": str(model.draft)})
    arguments = ("estimate", model.path, "--speculative-config", speculation, "--json")
    report = json.loads(command(*arguments).out)
    [table] = report["tables"]
    assert (table["name"], table["shape"]) == ("model.embed_tokens", [512, 256])
    assert not table["deferred"] and table["reason"].startswith(reason)
    assert report["checkpoint"] == weights


@pytest.mark.full
def test_with_nothing_on(
    command: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_LEAN_VOCAB", "0")
    result = command("estimate", SHAPE / "config.json")
    assert result.out.count("allocated: no pull request is on") == 2
    assert "0.0 of 4,850.0 MiB" in result.out


def test_what_is_no_model(command: Callable[..., Result], tmp_path: Path) -> None:
    broken, empty = tmp_path / "broken.json", tmp_path / "empty"
    broken.write_text('{"architectures": [')
    empty.mkdir()
    for model, problem in (
        (broken, "can't be read as JSON: Expecting value: line 1"),
        (empty, "no config.json there"),
        (write_config(tmp_path / "other", architectures=None), "no architectures"),
        ("an/unknown-id", "no such model in the local Hugging Face cache"),
    ):
        result = command("estimate", model)
        assert result.code == 2 and not result.out
        assert result.err.startswith(f"vllm-lean-vocab: {model}")
        assert problem in result.err and result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"mtp_num_hidden_layers": 0}, "its config says that it has no MTP layers"),
        pytest.param(NEW_CLASS, "['NewForCausalLM'] are not supported", marks=FULL),
        pytest.param({"model_type": "new"}, "model type `new`", marks=FULL),
        pytest.param(LLAMA, "no draft of the method 'mtp' for it", marks=FULL),
    ],
)
def test_what_vllm_refuses(
    command: Callable[..., Result],
    tmp_path: Path,
    changes: dict[str, Any],
    problem: str,
) -> None:
    model = write_config(tmp_path / "model", **changes)
    result = command("estimate", model)
    assert result.code == 2 and not result.out
    assert problem in result.err and result.err.count("\n") == 1


def test_usage(
    command: Callable[..., Result], capsys: pytest.CaptureFixture[str]
) -> None:
    for option, value in (
        ("--speculative-config", "{"),
        ("--speculative-config", "[]"),
        ("--tensor-parallel-size", "0"),
    ):
        with pytest.raises(SystemExit) as ended:
            command("estimate", SHAPE, option, value)
        assert ended.value.code == 2
        assert f"argument {option}: " in capsys.readouterr().err


@pytest.mark.full
def test_a_method_without_a_draft(command: Callable[..., Result]) -> None:
    ngram = '{"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_max": 2}'
    result = command("estimate", SHAPE, "--speculative-config", ngram)
    assert result.code == 2
    assert "with the method 'ngram' no draft is given" in result.err
