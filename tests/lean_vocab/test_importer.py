# SPDX-License-Identifier: Apache-2.0
"""Patched modules behave as modules do, and are the only ones that are touched."""

import importlib
import inspect
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vllm_lean_vocab.importer import (
    PatchedFinder,
    PatchedLoader,
    Swap,
    TooEarly,
    imported_too_early,
    install,
    module_name,
    swaps,
)

from .installed import is_patched, served_modules
from .processes import Processes

STOCK = """
from .helper import value

class Thing:
    kind = "stock"

def fail():
    raise ValueError("stock")
"""
PATCHED = """
# A line more than stock.
from .helper import value
from .new import NEW

class Thing:
    kind = "patched"

def fail():
    raise ValueError("patched")  # this very line
"""
FILES = {"fakevllm/sub/edited.py": PATCHED, "fakevllm/sub/new.py": "NEW = 1\n"}


@pytest.fixture(autouse=True)
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a package `fakevllm`; afterwards nothing of it is left."""
    package = tmp_path / "site" / "fakevllm" / "sub"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text("")
    (package / "edited.py").write_text(STOCK)
    (package / "helper.py").write_text("value = 42\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "fakevllm"]:
        del sys.modules[name]


def serve(
    tmp_path: Path,
    files: dict[str, str] = FILES,
    after_import: Callable[[ModuleType], None] | None = None,
) -> PatchedFinder:
    """Write the files to a cache of its own, and serve them."""
    folder = tmp_path / "cache"
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    finder = PatchedFinder(folder, files, after_import)
    install(finder)
    return finder


def edited() -> Any:
    return importlib.import_module("fakevllm.sub.edited")


def test_module_and_its_file(tmp_path: Path) -> None:
    serve(tmp_path)
    module = edited()
    path = str(tmp_path / "cache" / "fakevllm/sub/edited.py")
    assert module.__file__ == module.__spec__.origin == path
    assert module.fail.__code__.co_filename == path
    assert module.__name__ == module.__spec__.name == "fakevllm.sub.edited"
    assert module.__package__ == "fakevllm.sub"
    assert (module.Thing.kind, module.value, module.NEW) == ("patched", 42, 1)
    assert isinstance(module.__loader__, PatchedLoader)
    assert sys.modules["fakevllm.sub"].edited is module


def test_source_and_traceback(tmp_path: Path) -> None:
    serve(tmp_path)
    module = edited()
    assert inspect.getsource(module) == PATCHED
    assert "patched" in inspect.getsource(module.fail)
    assert 'kind = "patched"' in inspect.getsource(module.Thing)
    with pytest.raises(ValueError) as error:
        module.fail()
    shown = "".join(traceback.format_exception(error.value))
    assert 'raise ValueError("patched")  # this very line' in shown
    assert f'{module.__file__}", line {PATCHED.count(chr(10))}, in fail' in shown


def test_classes_are_pickled_by_reference(tmp_path: Path) -> None:
    serve(tmp_path)
    thing = edited().Thing
    data = pickle.dumps(thing)
    assert pickle.loads(data) is thing
    assert b"fakevllm.sub.edited" in data and b"patched" not in data


def test_only_the_listed_modules_are_touched(tmp_path: Path) -> None:
    finder = serve(tmp_path)
    edited()
    for name in ("fakevllm", "fakevllm.sub", "fakevllm.sub.helper"):
        assert not isinstance(sys.modules[name].__loader__, PatchedLoader)
        assert finder.find_spec(name) is None
    assert importlib.util.find_spec("fakevllm.sub.absent") is None


def test_a_module_is_served_from_what_was_checked(tmp_path: Path) -> None:
    serve(tmp_path)
    (tmp_path / "cache" / "fakevllm/sub/edited.py").write_text("raise SystemExit\n")
    assert edited().Thing.kind == "patched"


def test_no_byte_code_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    serve(tmp_path)
    edited()
    assert not list((tmp_path / "cache").rglob("*.pyc"))
    assert list((tmp_path / "site").rglob("helper*.pyc"))


def test_imported_too_early(tmp_path: Path) -> None:
    paths = list(FILES)
    assert imported_too_early(paths) == []
    stock = edited()
    assert imported_too_early(paths) == ["fakevllm/sub/edited.py"]
    serve(tmp_path)
    assert edited() is stock and stock.Thing.kind == "stock"
    # A patched one is no obstacle, for instance when plugins are loaded again.
    del sys.modules["fakevllm.sub.edited"]
    assert edited().Thing.kind == "patched"
    assert imported_too_early(paths) == []


def test_a_second_finder_replaces_the_first(tmp_path: Path) -> None:
    others = list(sys.meta_path)
    serve(tmp_path)
    second = serve(tmp_path, {"fakevllm/sub/edited.py": "second = True\n"})
    finders = [f for f in sys.meta_path if isinstance(f, PatchedFinder)]
    assert finders == [second] == sys.meta_path[:1]
    assert [f for f in others if not isinstance(f, PatchedFinder)] == sys.meta_path[1:]
    assert edited().second
    assert importlib.util.find_spec("fakevllm.sub.new") is None


def test_a_module_that_fails_is_not_kept(tmp_path: Path) -> None:
    serve(tmp_path, {"fakevllm/sub/edited.py": "x = 1\nraise KeyError('no')\n"})
    for _ in range(2):
        with pytest.raises(KeyError, match="no"):
            edited()
        assert "fakevllm.sub.edited" not in sys.modules


def test_after_import_is_called_once_with_each_module(tmp_path: Path) -> None:
    seen: list[ModuleType] = []
    serve(tmp_path, FILES, seen.append)
    module = edited()
    edited()
    # The one imports the other.
    assert seen == [sys.modules["fakevllm.sub.new"], module]


def test_future_imports_of_this_project_do_not_leak(tmp_path: Path) -> None:
    loader = PatchedLoader(tmp_path / "m.py", "def f(x: 1 + 1): pass\n")
    scope: dict[str, Any] = {}
    exec(loader.get_code("m"), scope)
    assert scope["f"].__annotations__ == {"x": 2}


def test_a_relative_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # E.g. VLLM_CACHE_ROOT=cache. Dynamo asserts that the two are equal.
    monkeypatch.chdir(tmp_path)
    serve(Path())
    module = edited()
    assert module.fail.__code__.co_filename == module.__file__


# ------------------------------------------------------- what was imported too early

EARLY = """
import functools

def traced(function):
    @functools.wraps(function)
    def call(*args):
        return "traced", function(*args)
    return call

class Base:
    def build(self, size=1):
        return size

class Thing(Base):
    x = property(lambda self: 1)

    def build(self, size=1, *, flag=False):
        return super().build(size), flag

    @staticmethod
    @traced
    def load(path):
        return path

    @property
    def name(self):
        return "stock"

    @name.setter
    def name(self, value):
        pass

def fail():
    raise ValueError("stock")
"""


def early(patched: str) -> tuple[Any, list[Swap]]:
    """Import the module, and return it with what its patched source changes."""
    name, path = "fakevllm.sub.early", "fakevllm/sub/early.py"
    import fakevllm.sub  # type: ignore[import-not-found]

    Path(fakevllm.sub.__path__[0], "early.py").write_text(EARLY)
    module = importlib.import_module(name)
    cache = Path(fakevllm.sub.__path__[0]).parents[2] / "cache" / path
    cache.parent.mkdir(parents=True)
    cache.write_text(patched)
    return module, swaps(name, EARLY, patched, cache)


def changed(*pairs: tuple[str, str], source: str = EARLY) -> str:
    for old, new in pairs:
        assert source.count(old) == 1
        source = source.replace(old, new)
    return source


def test_functions_that_are_there_get_new_code() -> None:
    patched = changed(
        ("return super().build(size), flag", "return super().build(size), 'new'"),
        ("        return path", "        import os\n\n        return os.sep, path"),
        ('raise ValueError("stock")', 'raise ValueError("patched")  # this line'),
    )
    module, found = early(patched)
    thing, build, fail = module.Thing(), module.Thing.build, module.fail
    assert [swap.code.co_qualname for swap in found] == [
        "Thing.build",
        "Thing.load",
        "fail",
    ]
    # Nothing is changed before everything is known to fit.
    assert thing.build() == (1, False)

    install(PatchedFinder(Path(), {}), found)
    assert thing.build() == (1, "new") and build(thing, 2) == (2, "new")
    assert thing.load("p") == ("traced", (os.sep, "p"))
    with pytest.raises(ValueError) as error:
        fail()
    shown = "".join(traceback.format_exception(error.value))
    assert 'raise ValueError("patched")  # this line' in shown
    assert f'early.py", line {patched.count(chr(10))}, in fail' in shown
    assert "cache" in fail.__code__.co_filename
    assert "patched" in inspect.getsource(fail)
    # Again, as when plugins are loaded a second time.
    path = Path(fail.__code__.co_filename)
    assert len(swaps(module.__name__, EARLY, patched, path)) == 3


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("import functools", "import functools, os", "more than the bodies"),
        ("flag=False", "flag=True", "more than the bodies"),
        ("    @traced\n", "", "more than the bodies"),
        ("x = property(lambda self: 1)", "x = 2", "more than the bodies"),
        ("def fail", "def added(): pass\n\ndef fail", "more than the bodies"),
        ('return "stock"', 'return "patched"', "Thing.name is no plain function"),
        ("return super().build(size), flag", "return flag", "uses other variables"),
    ],
)
def test_more_than_code_of_functions(old: str, new: str, reason: str) -> None:
    with pytest.raises(TooEarly, match=reason):
        early(changed((old, new)))


def test_a_function_that_others_changed() -> None:
    patched = changed(('raise ValueError("stock")', "pass"))
    module, _ = early(patched)
    path = Path(module.__file__)
    module.fail = lambda: None
    with pytest.raises(TooEarly, match="fail was changed by others"):
        swaps(module.__name__, EARLY, patched, path)
    del module.fail
    with pytest.raises(TooEarly, match="fail is no plain function"):
        swaps(module.__name__, EARLY, patched, path)


def test_a_module_that_is_not_what_its_file_says() -> None:
    patched = changed(('raise ValueError("stock")', "pass"))
    module, _ = early(patched)
    updated = changed(('ValueError("stock")', 'ValueError("update")'))
    with pytest.raises(TooEarly, match="fail was changed by others"):
        swaps(module.__name__, updated, patched, Path(module.__file__))


def test_module_name() -> None:
    assert module_name("vllm/v1/worker/gpu/utils.py") == "vllm.v1.worker.gpu.utils"


# ---------------------------------------------------------------------- real vLLM


def import_patched_vllm() -> dict[str, Any]:
    """Import all that is patched, in a process of its own."""
    import vllm
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    asked = sorted(served_modules())
    swapped = [name for name in asked if name in sys.modules]
    patched = [name for name in asked if is_patched(name)]
    modules = [importlib.import_module(name) for name in asked if name not in swapped]
    for module in modules:
        assert module.__file__ is not None
        assert inspect.getsource(module) == Path(module.__file__).read_text()
        for _, thing in inspect.getmembers(module):
            if getattr(thing, "__module__", None) != module.__name__:
                continue
            if inspect.isfunction(thing):
                code = inspect.unwrap(thing).__code__
                assert code.co_filename == module.__file__, thing
            if inspect.isclass(thing):
                assert pickle.loads(pickle.dumps(thing)) is thing
                assert inspect.getsource(thing) in inspect.getsource(module)
    mtp: Any = sys.modules["vllm.model_executor.models.qwen3_5_mtp"]
    placeholder = mtp.draft_lm_head(object, _AlonePpGroup())(prefix="lm_head")
    try:
        placeholder(None)
    except RuntimeError:
        shown = traceback.format_exc()
    loaded = {
        name
        for name, module in list(sys.modules.items())
        if isinstance(getattr(module, "__loader__", None), PatchedLoader)
    }
    assert loaded == {*asked} - {*swapped}
    return {
        "asked": asked,
        "patched": patched,
        "swapped": swapped,
        "files": [module.__file__ for module in modules],
        "shown": shown,
        "vllm": vllm.__file__,
        "co_filename": mtp.Qwen3_5MTP.load_weights.__code__.co_filename,
        "mtp": mtp.__file__,
    }


class _AlonePpGroup:
    world_size = 1


def test_vllm(processes: Processes, tmp_path: Path) -> None:
    cache = tmp_path / "cache_root"
    facts = processes.run(import_patched_vllm, VLLM_CACHE_ROOT=str(cache)).value
    assert facts["patched"] == facts["asked"]
    # The process has imported layers before, as those with a quantized model do.
    assert facts["swapped"] == [
        "vllm.model_executor.layers.vocab_parallel_embedding",
        "vllm.model_executor.model_loader.base_loader",
    ]
    assert facts["co_filename"] == facts["mtp"]
    for file in facts["files"]:
        assert file.startswith(f"{cache}/lean_vocab{os.sep}")
    assert not facts["vllm"].startswith(str(cache))
    assert "deferred_vocab.py" in facts["shown"]
    assert "raise RuntimeError(self.message)" in facts["shown"]
    assert "VLLM_LEAN_VOCAB=0" in facts["shown"]
