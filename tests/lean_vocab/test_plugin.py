# SPDX-License-Identifier: Apache-2.0
"""The plugin, as vLLM loads it: what is on, what is said, and what is left alone.

Each scenario runs in a process of its own that loads vLLM's plugins for the first time.
"""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_lean_vocab import importer, plan, plugin
from vllm_lean_vocab.edits import In, Insert
from vllm_lean_vocab.series import SERIES

from .installed import is_patched, served_modules
from .processes import Processes
from .starts import (
    BASE,
    DEFERRED_VOCAB,
    EVERYTHING,
    IDS,
    MTP,
    ON,
    ON_ITS_OWN,
    V2_LOADER,
    check_stock,
    load,
    only_warning,
    served,
    warnings,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache_root"


# ----------------------------------------------------------------------- the switch


def test_on_by_default_and_warm_without_libcst(
    processes: Processes, root: Path
) -> None:
    for warm in (False, True):
        outcome = processes.run(load, VLLM_CACHE_ROOT=str(root))
        assert served(outcome) == EVERYTHING
        assert outcome.value["libcst"] is not warm
        [line] = outcome.lines(ON)
        assert "INFO" in line and f": {IDS} (VLLM_LEAN_VOCAB=0" in line
        # When it is used: in its main process vLLM sets up logging after plugins.
        assert outcome.output.index("plugins loaded") < outcome.output.index(ON)
        assert not warnings(outcome)
    [entry] = (root / "lean_vocab").iterdir()
    assert (entry / "manifest.json").exists()


def test_off(processes: Processes, root: Path) -> None:
    outcome = processes.run(load, VLLM_CACHE_ROOT=str(root), VLLM_LEAN_VOCAB="0")
    check_stock(outcome)
    assert not warnings(outcome) and not outcome.value["libcst"]
    assert not (root / "lean_vocab").exists()


def test_off_by_vllms_own_switch(processes: Processes, root: Path) -> None:
    outcome = processes.run(load, VLLM_CACHE_ROOT=str(root), VLLM_PLUGINS="other")
    check_stock(outcome)
    assert not warnings(outcome)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("1", EVERYTHING),
        ("deferred_vocab", BASE),
        (" deferred_vocab , ", BASE),
        ("qwen3_5_mtp", BASE | {MTP}),
        ("qwen3_5_mtp,deferred_vocab", BASE | {MTP}),
        ("glm_mtp", BASE | served_modules("glm_mtp")),
        ("qwen3_5_embed_quant", ON_ITS_OWN),
        ("draft_vocab", BASE | served_modules("draft_vocab")),
    ],
)
def test_list(asked: str, expected: set[str], processes: Processes, root: Path) -> None:
    outcome = processes.run(load, VLLM_CACHE_ROOT=str(root), VLLM_LEAN_VOCAB=asked)
    assert served(outcome) == expected
    assert len(outcome.lines(ON)) == 1
    assert not warnings(outcome)


def test_unknown_id(processes: Processes, root: Path) -> None:
    outcome = processes.run(
        load, VLLM_CACHE_ROOT=str(root), VLLM_LEAN_VOCAB="deferred_vocab,qwen,0"
    )
    assert served(outcome) == BASE
    assert f"unknown: 0, qwen. Known: {IDS}" in only_warning(outcome)


def test_only_unknown_ids(processes: Processes, root: Path) -> None:
    outcome = processes.run(load, VLLM_CACHE_ROOT=str(root), VLLM_LEAN_VOCAB="off")
    check_stock(outcome)
    assert f"unknown: off. Known: {IDS}" in only_warning(outcome)


def load_and_validate(hard_fail: bool) -> dict[str, Any]:
    from vllm import envs
    from vllm.platforms import current_platform

    before = envs.compile_factors()
    loaded = load()
    assert "VLLM_LEAN_VOCAB" in envs.environment_variables
    assert os.environ.get("VLLM_LEAN_VOCAB") == envs.VLLM_LEAN_VOCAB
    # As EngineArgs.create_engine_config does, with --fail-on-environ-validation.
    current_platform.validate_environ(hard_fail)
    after = envs.compile_factors()
    assert set(after) == {*before, "VLLM_LEAN_VOCAB"}
    return {**loaded, "factor": after["VLLM_LEAN_VOCAB"]}


@pytest.mark.parametrize("asked", ["0", "deferred_vocab"])
def test_vllm_knows_the_variable(asked: str, processes: Processes, root: Path) -> None:
    outcome = processes.run(
        load_and_validate, True, VLLM_CACHE_ROOT=str(root), VLLM_LEAN_VOCAB=asked
    )
    assert outcome.value["factor"] == asked
    assert not outcome.lines("Unknown vLLM environment variable")


def test_the_variable_need_not_be_set(processes: Processes, root: Path) -> None:
    outcome = processes.run(load_and_validate, True, VLLM_CACHE_ROOT=str(root))
    assert outcome.value["factor"] is None
    assert served(outcome) == EVERYTHING


# --------------------------------------------------------------------- cannot apply


def load_late(name: str) -> dict[str, Any]:
    early = importlib.import_module(name)
    loaded = load()
    assert sys.modules[name] is early is importlib.import_module(name)
    assert not isinstance(early.__loader__, importer.PatchedLoader)
    return {**loaded, "file": early.__file__}


@pytest.mark.parametrize("name", [MTP, V2_LOADER])
def test_module_imported_too_early(name: str, processes: Processes, root: Path) -> None:
    outcome = processes.run(load_late, name, VLLM_CACHE_ROOT=str(root))
    warning = only_warning(outcome)
    assert f"{name} was imported before vLLM loaded its plugins" in warning
    if name == MTP:
        # `find_spec` tells of a module that is imported where it came from.
        others = ("deferred_vocab", "glm_mtp", "draft_vocab")
        assert served(outcome) == served_modules(*others)
        assert "qwen3_5_mtp: " in warning and "deferred_vocab: " not in warning
    else:
        assert served(outcome) == ON_ITS_OWN
        assert "deferred_vocab: " in warning
        assert "qwen3_5_mtp: builds on deferred_vocab" in warning
    assert not outcome.value["file"].startswith(str(root))


EARLY_LAYERS = "vllm.model_executor.layers.vocab_parallel_embedding"


def load_after_others_changed_a_layer() -> dict[str, Any]:
    """Load where a function that is to get new code is not vLLM's any more."""
    assert EARLY_LAYERS in sys.modules
    embedding = sys.modules[EARLY_LAYERS].VocabParallelEmbedding
    stock = embedding.__init__
    embedding.__init__ = lambda self, *args, **kwargs: stock(self, *args, **kwargs)
    loaded = load()
    assert "lean_vocab" not in stock.__code__.co_filename
    return loaded


def test_layers_that_others_changed(processes: Processes, root: Path) -> None:
    outcome = processes.run(
        load_after_others_changed_a_layer, VLLM_CACHE_ROOT=str(root)
    )
    others = {pull_request.id for pull_request in SERIES} - {"draft_vocab"}
    assert served(outcome) == served_modules(*others)
    warning = only_warning(outcome)
    assert f"draft_vocab: {EARLY_LAYERS} was imported before" in warning
    assert "VocabParallelEmbedding.__init__ was changed by others" in warning


def load_with_a_conflict(id: str) -> dict[str, Any]:
    """Load with one more edit, which fits nowhere, in a pull request."""
    [doctored] = [pull_request for pull_request in SERIES if pull_request.id == id]
    first, *others = doctored.edits
    unfit = In(first.path, *first.edits, Insert("Nowhere.at_all", "x", after="y"))
    series = [
        p._replace(edits=[unfit, *others]) if p is doctored else p for p in SERIES
    ]
    plugin.SERIES = tuple(series)  # type: ignore[assignment]
    return load()


def test_conflict(processes: Processes, root: Path) -> None:
    outcome = processes.run(
        load_with_a_conflict, "qwen3_5_mtp", VLLM_CACHE_ROOT=str(root)
    )
    others = {pull_request.id for pull_request in SERIES} - {"qwen3_5_mtp"}
    assert served(outcome) == served_modules(*others)
    warning = only_warning(outcome)
    assert "qwen3_5_mtp: vllm/model_executor/models/qwen3_5_mtp.py: " in warning
    assert "Nowhere.at_all: expected one definition, found 0" in warning
    [line] = outcome.lines(ON)
    assert "deferred_vocab" in line and "qwen3_5_mtp" not in line


def test_conflict_in_the_base(processes: Processes, root: Path) -> None:
    outcome = processes.run(
        load_with_a_conflict, "deferred_vocab", VLLM_CACHE_ROOT=str(root)
    )
    assert served(outcome) == ON_ITS_OWN
    warning = only_warning(outcome)
    assert "Nowhere.at_all" in warning
    assert "qwen3_5_mtp: builds on deferred_vocab" in warning


def load_with_an_exception(where: str) -> dict[str, Any]:
    def fail(*args: Any) -> Any:
        raise ZeroDivisionError("something unforeseen")

    module = {"make_plan": plan, "install": importer, "_choose": plugin}[where]
    setattr(module, where, fail)
    return load()


@pytest.mark.parametrize("where", ["make_plan", "install", "_choose"])
def test_exception(where: str, processes: Processes, root: Path) -> None:
    outcome = processes.run(load_with_an_exception, where, VLLM_CACHE_ROOT=str(root))
    check_stock(outcome)
    warning = only_warning(outcome)
    assert "ZeroDivisionError: something unforeseen" in warning
    assert "vLLM runs unpatched" in warning
    assert not outcome.lines("Traceback")


def load_out_of_tree() -> dict[str, Any]:
    from vllm import platforms

    class Stranger(type(platforms.current_platform)):  # type: ignore[misc]
        def is_out_of_tree(self) -> bool:
            return True

    platforms.current_platform = Stranger()
    return load()


def test_out_of_tree_platform(processes: Processes, root: Path) -> None:
    for environ in ({}, {"VLLM_LEAN_VOCAB": "1"}):
        outcome = processes.run(load_out_of_tree, VLLM_CACHE_ROOT=str(root), **environ)
        check_stock(outcome)
        warning = only_warning(outcome)
        assert "off: this platform comes from a plugin" in warning
        assert "VLLM_LEAN_VOCAB=deferred_vocab" in warning

    asked = warning.rpartition("VLLM_LEAN_VOCAB=")[2].strip()
    outcome = processes.run(
        load_out_of_tree, VLLM_CACHE_ROOT=str(root), VLLM_LEAN_VOCAB=asked
    )
    assert served(outcome) == EVERYTHING and not warnings(outcome)


def test_a_list_of_nothing_names_nothing(processes: Processes, root: Path) -> None:
    outcome = processes.run(
        load_out_of_tree, VLLM_CACHE_ROOT=str(root), VLLM_LEAN_VOCAB=","
    )
    check_stock(outcome)


# ---------------------------------------------------------------- again and elsewhere


def load_twice() -> dict[str, Any]:
    first = load()
    mtp = importlib.import_module(MTP)
    plugin.register()
    plugin.register()
    finders = [f for f in sys.meta_path if isinstance(f, importer.PatchedFinder)]
    assert importlib.import_module(MTP) is mtp
    deferred_vocab = importlib.import_module(DEFERRED_VOCAB)
    return {
        "first": first,
        "served": sorted(name for name in EVERYTHING if is_patched(name)),
        "finders": len(finders),
        "remedy": deferred_vocab.REMEDY.count("VLLM_LEAN_VOCAB=0"),
    }


def test_registering_again_is_harmless(processes: Processes, root: Path) -> None:
    asked = IDS.replace(" ", "") + ",unknown"
    outcome = processes.run(
        load_twice, VLLM_CACHE_ROOT=str(root), VLLM_LEAN_VOCAB=asked
    )
    assert served(outcome) == set(outcome.value["first"]["served"]) == EVERYTHING
    assert outcome.value["finders"] == outcome.value["remedy"] == 1
    assert "unknown: unknown" in only_warning(outcome)


def load_and_start_a_child() -> dict[str, Any]:
    """Load as the main process does, then in a worker that it starts."""
    loaded = load(sets_up_logging=False)
    print("now the child", flush=True)
    code = """
import json, sys
assert "vllm" not in sys.modules
from vllm.plugins import load_general_plugins
load_general_plugins()
print("served:", json.dumps(sorted(sys.meta_path[0].loaders)))
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    return loaded


def test_main_process_and_child(processes: Processes, root: Path) -> None:
    import vllm

    installed = Path(vllm.__path__[0]).parent
    folders = {(installed / name.replace(".", "/")).parent for name in EVERYTHING}
    before = {folder: _state_of(folder) for folder in folders}
    outcome = processes.run(
        load_and_start_a_child,
        VLLM_CACHE_ROOT=str(root),
        VLLM_LEAN_VOCAB=IDS.replace(" ", "") + ",unknown",
    )
    parent, child = outcome.output.split("now the child")
    # The warning is seen, though the main process sets up logging later; and once.
    assert "unknown: unknown" in parent
    assert "unknown: unknown" not in child
    assert served(outcome) == EVERYTHING
    assert f"served: {json.dumps(sorted(EVERYTHING))}" in child
    # Nothing of this was written to the installed vLLM.
    assert before == {folder: _state_of(folder) for folder in folders}


def _state_of(folder: Path) -> dict[str, tuple[int, int, int]]:
    return {
        entry.name: (entry.stat().st_mtime_ns, entry.stat().st_size, entry.inode())
        for entry in os.scandir(folder)
        if entry.name != "__pycache__"
    }


def inspect_model() -> dict[str, Any]:
    """Have the registry inspect a model, in the process that it starts for that."""
    from vllm.model_executor.models import registry

    stock_run = registry._run_in_subprocess
    files: list[str] = []

    def run_and_ask(inspect: Any) -> Any:
        def both() -> Any:
            import sys

            result = inspect()
            name = "vllm.model_executor.models.qwen3_5_mtp"
            return result, sys.modules[name].__file__

        result, file = stock_run(both)
        files.append(file)
        return result

    registry._run_in_subprocess = run_and_ask
    info = registry.ModelRegistry.models["Qwen3_5MTP"].inspect_model_cls()
    return {"architecture": info.architecture, "files": files}


def test_model_inspection(processes: Processes, root: Path) -> None:
    # This process loads no plugin: what is in the cache, the inspecting one wrote.
    outcome = processes.run(inspect_model, VLLM_CACHE_ROOT=str(root))
    assert outcome.value["architecture"] == "Qwen3_5MTP"
    [entry] = (root / "lean_vocab").iterdir()
    assert outcome.value["files"] == [
        str(entry / "vllm/model_executor/models/qwen3_5_mtp.py")
    ]
    assert list((root / "modelinfos").glob("*Qwen3_5MTP*"))
