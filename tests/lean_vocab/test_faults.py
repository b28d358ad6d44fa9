# SPDX-License-Identifier: Apache-2.0
"""Faults, each injected into a start of vLLM: it goes on, whole, and says so once.

Every start is a process that has imported vLLM and loads its plugins for the first
time. It then imports patched modules. Whatever was done to it, each pull request is
patched in all of its modules or in none; and where one is off, there is one warning.
"""

import ctypes
import importlib
import importlib.util
import json
import os
import py_compile
import resource
import select
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from vllm_lean_vocab import cache, importer, names, plan, plugin, rewrite
from vllm_lean_vocab.series import SERIES

from . import installed
from .installed import is_patched, served_modules
from .processes import Outcome, Processes
from .starts import (
    EVERYTHING,
    MTP,
    ON,
    PROPOSER,
    load,
    only_warning,
    served,
    warnings,
)

NOBODY = 65_534
ALL = frozenset(pull_request.id for pull_request in SERIES)
NONE: frozenset[str] = frozenset()
SECONDS = 100

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
full = pytest.mark.full

# ------------------------------------------------------------------- one start of vLLM


def start() -> dict[str, Any]:
    """Load the plugins as vLLM does, then import what is to be patched."""
    loaded = load()
    for name in (MTP, PROPOSER):
        importlib.import_module(name)
    # What is imported is what was announced.
    after = sorted(name for name in EVERYTHING if is_patched(name))
    return {**loaded, "announced": loaded["served"], "served": after}


def in_child(function: Callable[[], Any]) -> tuple[int, Any]:
    """Return the exit status of a process forked for a call, and what it returned."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            os.write(writer, json.dumps(function()).encode())
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        if not select.select([answer], [], [], SECONDS)[0]:
            os.kill(child, signal.SIGKILL)
        content = answer.read()
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), json.loads(content or b"null")


def as_nobody(function: Callable[[], Any]) -> Any:
    """Call in a process of another user, who has no rights."""
    # What lies in a home folder can't be read then.
    importlib.import_module("libcst.matchers")

    def call() -> Any:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        return function()

    status, value = in_child(call)
    assert status == 0, status
    return value


def start_with(name: str) -> dict[str, Any]:
    """Start with the fault of that name."""
    [fault] = [fault for fault in FAULTS if fault.name == name]
    root = Path(os.environ["VLLM_CACHE_ROOT"])
    if template := os.environ.get("TEMPLATE"):
        entry = next((Path(template) / "lean_vocab").iterdir())
        if fault.warm:
            shutil.copytree(template, root, dirs_exist_ok=True)
        made = cache._read(entry)
        if not fault.real_plan:
            plugin.plan.make_plan = lambda *_: made  # the same, without its seconds
    fault.inject(root)
    value = as_nobody(start) if fault.as_nobody else start()
    if fault.check is not None:
        fault.check(root)
    return value


class Fault(NamedTuple):
    """What is done to a start, and what it comes to.

    Attributes:
        name: What goes wrong.
        inject: Does it, in the process that is about to start, to a cache root.
        on: The pull requests that are patched all the same.
        warning: Part of the one warning, where any are off.
        warm: Whether the cache holds the plan already.
        as_nobody: Whether the start is another user's than the one who injects.
        real_plan: Whether LibCST makes the plan, or it is taken from an earlier start.
        root: Path of the cache root below a new folder.
        check: Called after the start, in the same process.

    """

    name: str
    inject: Callable[[Path], None]
    on: frozenset[str] = ALL
    warning: str = ""
    warm: bool = False
    as_nobody: bool = False
    real_plan: bool = False
    root: str = "cache_root"
    check: Callable[[Path], None] | None = None


NEW = {importer.module_name(path) for p in SERIES for path in p.new_files}


def on(outcome: Outcome) -> frozenset[str]:
    """Return the pull requests that are said to be on; each is so as a whole."""
    ids = {
        id
        for line in outcome.lines(ON)
        for id in line.rpartition(": ")[2].partition(" (")[0].split(", ")
    }
    if ids:
        assert served(outcome) == served_modules(*ids), outcome.output
    # New modules alone change nothing: only patched ones import them.
    assert ids or served(outcome) <= NEW, outcome.output
    return frozenset(ids)


# ---------------------------------------------------------------- faults of the cache


def nothing(root: Path) -> None:
    pass


def mount(root: Path, options: str, flags: int = 0) -> None:
    """Mount a file system in memory there, which only this process sees."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_namespace, recursive_private = 0x00020000, 0x00044000
    root.mkdir(parents=True, exist_ok=True)
    for failed in (
        lambda: libc.unshare(new_namespace),
        lambda: libc.mount(None, b"/", None, recursive_private, None),
        lambda: libc.mount(
            b"tmpfs", bytes(root), b"tmpfs", flags, options.encode() or None
        ),
    ):
        if failed():
            raise Unable(os.strerror(ctypes.get_errno()))


class Unable(Exception):
    """This machine doesn't let a fault be injected."""


def mount_read_only(root: Path) -> None:
    earlier = root.with_name("earlier")
    if root.exists():
        root.rename(earlier)
    mount(root, "")
    if earlier.exists():
        shutil.copytree(earlier, root, dirs_exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    read_only, remount = 1, 32
    if libc.mount(None, bytes(root), None, read_only | remount, None):
        raise Unable(os.strerror(ctypes.get_errno()))


def limit_file_size(root: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def nothing_left(root: Path) -> None:
    assert not any((root / "lean_vocab").iterdir())


def entry_of(root: Path) -> Path:
    [entry] = (root / "lean_vocab").iterdir()
    return entry


def cached(root: Path, name: str) -> Path:
    return entry_of(root) / f"{name.replace('.', '/')}.py"


def sound(root: Path) -> None:
    cache._read(entry_of(root))  # raises where it isn't
    assert (root / "lean_vocab").stat().st_mode & 0o777 == 0o700


def edit(root: Path) -> None:
    for file in entry_of(root).rglob("*.py"):
        file.write_text("raise SystemExit('evil')\n")


def truncate(root: Path) -> None:
    os.truncate(cached(root, MTP), 100)


def leave_half_written(root: Path) -> None:
    """Be killed in the middle of writing a file, under the entry's final name too."""

    def writer() -> None:
        entry = root / "lean_vocab" / plugin_key()
        entry.mkdir(parents=True, mode=0o700)
        aside = entry.with_name(f".{entry.name}.1.00000000")
        aside.mkdir(mode=0o700)
        for folder in (entry, aside):
            with open(folder / "manifest.json", "w") as file:
                file.write('{"statuses": [')
                file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(writer)[0] == -signal.SIGKILL


def plugin_key() -> str:
    return next((Path(os.environ["TEMPLATE"]) / "lean_vocab").iterdir()).name


def half_written_is_replaced(root: Path) -> None:
    cache._read(root / "lean_vocab" / plugin_key())


def pipe_in_place_of_a_file(root: Path) -> None:
    (entry_of(root) / "manifest.json").unlink()
    os.mkfifo(entry_of(root) / "manifest.json", 0o600)


def poison_byte_code(root: Path) -> None:
    evil = root / "evil.py"
    evil.write_text("raise SystemExit('evil')\n")
    for optimization in ("", "1", "2"):
        py_compile.compile(
            str(evil),
            importlib.util.cache_from_source(
                str(cached(root, MTP)), optimization=optimization
            ),
            # Such a file is taken without a look at the source.
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )


def link_elsewhere(root: Path) -> None:
    (root / "lean_vocab").rename(root / "elsewhere")
    (root / "lean_vocab").symlink_to(root / "elsewhere")


def link_the_root(root: Path) -> None:
    root.rename(root.with_name("elsewhere"))
    root.symlink_to("elsewhere")


def make_file(root: Path) -> None:
    root.write_text("a file")


def make_for_root_only(root: Path) -> None:
    root.mkdir(mode=0o755)


def make_for_nobody(root: Path) -> None:
    root.mkdir()
    os.chown(root, NOBODY, NOBODY)
    site_packages = installed.root()
    assert as_nobody(lambda: os.access(site_packages, os.W_OK)) is False


def give_away(root: Path) -> None:
    os.chown(root / "lean_vocab", NOBODY, NOBODY)


def make_world_writable(root: Path) -> None:
    (root / "lean_vocab").chmod(0o777)


LONG = "/".join(["ü" * 100] * 3)  # 200 bytes each
BEYOND_PATH_MAX = "/".join(["x" * 200] * 21)
# The root can be made, what is to lie in it can't.
NEARLY_PATH_MAX = "/".join(["x" * 200] * 19 + ["x" * 150])
NOT_UTF_8 = os.fsdecode(b"caf\xe9")

# ------------------------------------------------------ faults of the Python around it


def block_libcst(root: Path) -> None:
    class Blocker:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name.partition(".")[0] == "libcst":
                raise ModuleNotFoundError("No module named 'libcst'", name=name)

    for name in [name for name in sys.modules if name.startswith("libcst")]:
        del sys.modules[name]
    for module in (rewrite, names):  # this file imports them
        sys.modules.pop(module.__name__)
        delattr(sys.modules["vllm_lean_vocab"], module.__name__.rpartition(".")[2])
    sys.meta_path.insert(0, Blocker())  # type: ignore[arg-type]


def write_no_byte_code(root: Path) -> None:
    sys.dont_write_bytecode = True


def no_byte_code(root: Path) -> None:
    assert not list(root.rglob("*.pyc"))


class Hook:
    """An import hook as typeguard and jaxtyping have one: it asks PathFinder itself."""

    def __init__(self, *taken: str) -> None:
        self.taken = taken

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(name, path) if name.startswith(self.taken) else None


def hook_before(root: Path) -> None:
    sys.meta_path.insert(0, Hook("vllm"))  # type: ignore[arg-type]


def hook_behind(root: Path) -> None:
    _after_plugins(lambda: sys.meta_path.append(Hook("vllm")))  # type: ignore[arg-type]


def hook_that_takes(*taken: str) -> Callable[[Path], None]:
    def hook(root: Path) -> None:
        def put_first() -> None:
            sys.meta_path.insert(0, Hook(*taken))  # type: ignore[arg-type]
            importlib.import_module(MTP)

        _after_plugins(put_first)

    return hook


def _after_plugins(function: Callable[[], object]) -> None:
    """Have it called right after the plugin was, as the next plugin is."""
    register = plugin.register

    def both() -> None:
        register()
        function()

    plugin.register = both


def rewrite_assertions(root: Path) -> None:
    from _pytest.assertion import install_importhook

    config = pytest.Config.fromdictargs({}, [])
    hook = install_importhook(config)
    hook.mark_rewrite(MTP, PROPOSER)
    assert sys.meta_path[0] is hook


def other_plugin(first: bool, code: str) -> Callable[[Path], None]:
    """Install a plugin of somebody else, which vLLM loads before or after this one."""

    def install(root: Path) -> None:
        site = root.with_name("site")
        info = site / "other-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\n")
        (info / "entry_points.txt").write_text(
            "[vllm.general_plugins]\nother = other_plugin:register\n"
        )
        (site / "other_plugin.py").write_text(code)
        sys.path.insert(0 if first else len(sys.path), str(site))

    return install


IMPORTS = f"import {MTP}\ndef register(): pass\n"
IMPORTS_LATER = f"def register():\n    import {MTP}\n"
SAME_ARCHITECTURE = """
def register():
    from vllm import ModelRegistry
    ModelRegistry.register_model("Qwen3_5MTP", "other_draft:Draft")
"""


def register_the_same_architecture(root: Path) -> None:
    other_plugin(True, SAME_ARCHITECTURE)(root)
    stock = f"from {MTP} import Qwen3_5MTP\nclass Draft(Qwen3_5MTP): pass\n"
    (root.with_name("site") / "other_draft.py").write_text(stock)


def theirs_is_loaded(root: Path) -> None:
    from vllm import ModelRegistry

    draft = ModelRegistry.models["Qwen3_5MTP"].load_model_cls()
    assert draft.__module__ == "other_draft"
    assert draft.__mro__[1].__module__ == MTP and is_patched(MTP)


def break_the_package(root: Path) -> None:
    """Leave this package as an upgrade that was broken off would."""
    for name in [name for name in sys.modules if name.startswith("vllm_lean_vocab")]:
        del sys.modules[name]
    sys.modules["vllm_lean_vocab.series"] = None  # type: ignore[assignment]


def veto_the_second_swap(root: Path) -> None:
    given: list[str] = []

    def veto(event: str, args: tuple[Any, ...]) -> None:
        if event == "object.__setattr__" and args[1] == "__code__":
            given.append(args[0].__qualname__)
            if len(given) == 2:
                raise MemoryError("no second one")

    sys.addaudithook(veto)


# The module imports the one that the other pull request edits.
NOT_MTP = ALL - {"qwen3_5_mtp", "qwen3_5_embed_quant"}
CANNOT_IMPORT = f"{MTP} was imported before vLLM loaded its plugins"

FAULTS = [
    Fault("cache folder missing", nothing, real_plan=True, check=sound),
    Fault("cache root is a file", make_file, NONE, "Not a directory"),
    Fault(
        "cache root not writable",
        make_for_root_only,
        NONE,
        "Permission denied",
        as_nobody=True,
    ),
    Fault(
        "read-only site-packages, another user",
        make_for_nobody,
        as_nobody=True,
        real_plan=True,
    ),
    Fault("read-only file system, cold", mount_read_only, NONE, "Read-only file"),
    Fault("read-only file system, warm", mount_read_only, warm=True),
    Fault(
        "file system full",
        lambda root: mount(root, "size=64k"),
        NONE,
        "No space left on device",
        check=nothing_left,
    ),
    Fault(
        "file system out of inodes",
        lambda root: mount(root, "nr_inodes=8"),
        NONE,
        "No space left on device",
        check=nothing_left,
    ),
    Fault(
        "file size limited",
        limit_file_size,
        NONE,
        "File too large",
        check=nothing_left,
    ),
    Fault(
        "cache folder is a link elsewhere",
        link_elsewhere,
        NONE,
        "not a plain file or folder",
        warm=True,
    ),
    Fault("cache root is a link elsewhere", link_the_root, warm=True, check=sound),
    Fault(
        "cache folder of another user",
        give_away,
        NONE,
        f"belongs to another user (uid {NOBODY})",
        warm=True,
    ),
    Fault("cache folder world-writable", make_world_writable, warm=True, check=sound),
    Fault("cached file edited", edit, warm=True, check=sound),
    Fault("cached file truncated", truncate, warm=True, check=sound),
    Fault(
        "cached file half written by a killed process",
        leave_half_written,
        check=half_written_is_replaced,
    ),
    Fault("named pipe for a cached file", pipe_in_place_of_a_file, warm=True),
    Fault("poisoned byte code", poison_byte_code, warm=True),
    Fault("path of 600 bytes, not ASCII", nothing, root=LONG, check=sound),
    Fault("path with a name too long", nothing, NONE, "too long", root="ü" * 130),
    Fault("path too long", nothing, NONE, "too long", root=BEYOND_PATH_MAX),
    Fault(
        "path too long for what lies in the cache",
        nothing,
        NONE,
        "too long",
        root=NEARLY_PATH_MAX,
    ),
    Fault("path not UTF-8", nothing, root=NOT_UTF_8, check=sound),
    Fault(
        "path not UTF-8, of another user",
        give_away,
        NONE,
        "belongs to another user",
        warm=True,
        root=NOT_UTF_8,
    ),
    Fault("LibCST missing, cold", block_libcst, NONE, "libcst", real_plan=True),
    Fault("LibCST missing, warm", block_libcst, warm=True, real_plan=True),
    Fault("no byte code is written", write_no_byte_code, check=no_byte_code),
    Fault("import hook in front, earlier", hook_before),
    Fault("import hook behind", hook_behind),
    Fault(
        "import hook in front, later, of all of vLLM",
        hook_that_takes("vllm."),
        NONE,
        f"another import hook took {MTP}",
    ),
    Fault(
        "import hook in front, later, of one module",
        hook_that_takes(MTP),
        NONE,
        f"another import hook took {MTP}",
    ),
    Fault("pytest rewrites assertions", rewrite_assertions),
    Fault(
        "other plugin imports a module when imported",
        other_plugin(False, IMPORTS),
        NOT_MTP,
        CANNOT_IMPORT,
        real_plan=True,
    ),
    Fault(
        "other plugin imports a module when called, before",
        other_plugin(True, IMPORTS_LATER),
        NOT_MTP,
        CANNOT_IMPORT,
        real_plan=True,
    ),
    Fault(
        "other plugin imports a module when called, after",
        other_plugin(False, IMPORTS_LATER),
    ),
    Fault(
        "other plugin registers the same architecture",
        register_the_same_architecture,
        check=theirs_is_loaded,
    ),
    Fault(
        "this package is damaged",
        break_the_package,
        NONE,
        "Failed to load plugin lean_vocab",
    ),
    Fault(
        "swap of a function's code fails halfway",
        veto_the_second_swap,
        NONE,
        "MemoryError: no second one",
    ),
]
AS_ROOT = {
    "cache root not writable",
    "read-only site-packages, another user",
    "read-only file system, cold",
    "read-only file system, warm",
    "file system full",
    "file system out of inodes",
    "cache folder of another user",
    "path not UTF-8, of another user",
}


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can look into."""
    folder = Path(tempfile.mkdtemp(prefix="faults"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def template(
    processes: Processes, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A cache root with the plan for the installed vLLM."""
    root = tmp_path_factory.mktemp("template")
    processes.run(load, VLLM_CACHE_ROOT=str(root))
    yield root


def check(outcome: Outcome, expected: frozenset[str] = ALL, warning: str = "") -> None:
    """Check what holds of every start, whatever was done to it."""
    assert on(outcome) == expected, outcome.output
    assert "evil" not in outcome.output
    if expected == ALL:
        assert not warnings(outcome), outcome.output
    elif warning.startswith("Failed to load"):  # vLLM's words
        assert len(outcome.lines(warning)) == 1 and not warnings(outcome)
    else:
        assert warning in only_warning(outcome)
        assert not outcome.lines("Traceback")


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(f, id=f.name, marks=[needs_root] if f.name in AS_ROOT else [])
        for f in FAULTS
    ],
)
def test_fault(
    fault: Fault, processes: Processes, template: Path, open_folder: Path
) -> None:
    try:
        outcome = processes.run(
            start_with,
            fault.name,
            VLLM_CACHE_ROOT=str(open_folder / fault.root),
            TEMPLATE=str(template),
        )
    except AssertionError as error:
        if "Unable: " in str(error):
            pytest.skip("nothing can be mounted here")
        raise
    check(outcome, fault.on, fault.warning)


# ---------------------------------------------------------- errors in the plugin itself


class Panic(BaseException):
    """As LibCST's parser raises one; no `Exception`."""


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


ERRORS: dict[str, BaseException] = {
    error.__class__.__name__: error
    for error in (
        MemoryError("injected"),
        RecursionError("injected"),
        Panic("injected"),
        Unspeakable(),
    )
}
PLACES = {
    plugin: "_declare_variable _register _choose _catch_up _own_files _read _make_plan "
    "_Announce",
    plan: "with_bases source_paths make_plan",
    cache: "key_of cached_plan _make_private _alone _write _write_file _manifest_of "
    "_read",
    importer: "imported_too_early swaps _bodies _codes PatchedFinder install",
    rewrite: "apply_edits",
    names: "check_names",
}


def start_raising(module: str, place: str, error: str) -> dict[str, Any]:
    """Start with an error raised wherever that function of the plugin is called."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ERRORS[error]

    setattr(sys.modules[module], place, fail)
    if module not in (rewrite.__name__, names.__name__, plan.__name__):
        entry = next((Path(os.environ["TEMPLATE"]) / "lean_vocab").iterdir())
        made = real_read(entry)
        plugin.plan.make_plan = lambda *_: made
    return load()


real_read = cache._read
RAISED = [
    (module.__name__, place)
    for module, places in PLACES.items()
    for place in places.split()
]


@pytest.mark.parametrize(
    ("module", "place", "error"),
    [
        (*where, error)
        for number, where in enumerate(RAISED)
        for error in [list(ERRORS)[number % len(ERRORS)]]
    ],
)
def test_error_in_the_plugin(
    module: str,
    place: str,
    error: str,
    processes: Processes,
    template: Path,
    tmp_path: Path,
) -> None:
    outcome = processes.run(
        start_raising,
        module,
        place,
        error,
        VLLM_CACHE_ROOT=str(tmp_path),
        TEMPLATE=str(template),
    )
    said = "" if place == "_read" else error
    check(outcome, NONE, said)


# ------------------------------------------------------------------- many and killed

STEPS = {"open", "os.mkdir", "os.rename", "os.rmdir", "os.remove", "os.chmod"}


def load_and_be_killed(step: int) -> None:
    """Load, and be killed when the cache is about to do its n-th step on disk."""
    cached_plan = cache.cached_plan
    count = 0
    counting = False

    def count_and_kill(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if counting and (event in STEPS or event == "fcntl.flock"):
            count += 1
            if count == step:
                os.kill(os.getpid(), signal.SIGKILL)

    def counted(*args: Any) -> Any:
        nonlocal counting
        counting = True
        try:
            return cached_plan(*args)
        finally:
            counting = False

    sys.addaudithook(count_and_kill)
    cache.cached_plan = counted
    plugin.register()


def finders() -> list[str]:
    plugin.register()
    first = sys.meta_path[0]
    return sorted(first.loaders) if isinstance(first, importer.PatchedFinder) else []


def kill_at_each_step(damaged: bool) -> dict[str, Any]:
    """Kill a start at each step, and start again after each."""
    template, root = (Path(os.environ[n]) for n in ("TEMPLATE", "VLLM_CACHE_ROOT"))
    made = cache._read(entry_of(template))
    plugin.plan.make_plan = lambda *_: made
    results: list[list[str]] = []
    for step in range(1, 1_000):
        shutil.rmtree(root, ignore_errors=True)
        if damaged:
            shutil.copytree(template, root)
            edit(root)
        status, _ = in_child(lambda step=step: load_and_be_killed(step))
        if status == 0:
            break
        assert status == -signal.SIGKILL, status
        status, names = in_child(finders)
        assert status == 0
        cache._read(root / "lean_vocab" / plugin_key())
        results.append(names)
    return {"served": results}


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize(
    "asked", ["qwen3_5_embed_quant", pytest.param("1", marks=full)]
)
def test_killed_at_each_step(
    asked: str, damaged: bool, processes: Processes, tmp_path: Path
) -> None:
    template = tmp_path / "template"
    processes.run(load, VLLM_CACHE_ROOT=str(template), VLLM_LEAN_VOCAB=asked)
    outcome = processes.run(
        kill_at_each_step,
        damaged,
        VLLM_CACHE_ROOT=str(tmp_path / "cache_root"),
        VLLM_LEAN_VOCAB=asked,
        TEMPLATE=str(template),
    )
    expected = EVERYTHING if asked == "1" else served_modules(asked)
    results = outcome.value["served"]
    assert len(results) > 10 + 2 * len(expected)
    assert all(set(result) == expected for result in results)
    assert not warnings(outcome)


def start_together(count: int) -> dict[str, Any]:
    """Start several processes at the same moment."""
    gate, opener = os.pipe()
    started: list[tuple[int, int]] = []
    for _ in range(count):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(opener)
            os.read(gate, 1)  # until it is closed
            os.write(writer, json.dumps(load()["served"]).encode())
            os._exit(0)
        os.close(writer)
        started.append((child, reader))
    os.close(opener)
    results = [json.loads(os.fdopen(reader, "rb").read()) for _, reader in started]
    assert all(os.waitpid(child, 0)[1] == 0 for child, _ in started)
    assert all(result == results[0] for result in results)
    return {"served": results[0]}


def test_eight_processes_start_cold_together(
    processes: Processes, tmp_path: Path
) -> None:
    outcome = processes.run(start_together, 8, VLLM_CACHE_ROOT=str(tmp_path))
    check(outcome)
    sound(tmp_path)


# ---------------------------------------------------------------- hooks that come late


def start_then_hook() -> dict[str, Any]:
    """Let another import hook take a module once others were imported patched."""
    load()
    sys.meta_path.insert(0, Hook(MTP))  # type: ignore[arg-type]
    importlib.import_module(MTP)
    return start()


def test_hook_put_in_front_once_modules_are_in_use(
    processes: Processes, tmp_path: Path
) -> None:
    outcome = processes.run(start_then_hook, VLLM_CACHE_ROOT=str(tmp_path))
    # What was imported can't be taken back; all that comes after is patched.
    assert served(outcome) == EVERYTHING - {MTP}
    warning = only_warning(outcome)
    assert f"partly patched: another import hook took {MTP}" in warning
    assert "VLLM_LEAN_VOCAB=0 turns it off" in warning


# ------------------------------------------------------------- another vLLM, warm cache


@pytest.fixture
def copied_vllm(tmp_path: Path) -> Path:
    """The installed vLLM with a file of its own, which can be edited: Qwen3.5's MTP."""
    site = tmp_path / "site"
    path = Path(f"{MTP.replace('.', '/')}.py")
    for depth, folder in enumerate(list(path.parents)[-2::-1], start=1):
        (site / folder).mkdir(parents=True)
        for entry in (installed.root() / folder).iterdir():
            if entry.name not in ("__pycache__", path.parts[depth]):
                (site / folder / entry.name).symlink_to(entry)
    shutil.copyfile(installed.root() / path, site / path)
    return site / path


def start_and_show_mtp() -> dict[str, Any]:
    value = start()
    module = sys.modules[MTP]
    return {**value, "file": module.__file__, "new": getattr(module, "NEW", None)}


def test_vllm_upgraded_under_a_warm_cache(
    copied_vllm: Path, template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = copied_vllm.parents[3]
    inherited = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, [str(site), inherited]))
    )
    root = tmp_path / "cache_root"
    shutil.copytree(template, root)
    environ = {"VLLM_CACHE_ROOT": str(root)}
    stock = copied_vllm.read_text()
    with Processes(tmp_path) as processes:
        outcome = processes.run(start_and_show_mtp, **environ)
        check(outcome)
        entry_of(root)  # the same vLLM, from the cache

        copied_vllm.write_text(stock + "NEW = 'of the new version'\n")
        outcome = processes.run(start_and_show_mtp, **environ)
        check(outcome)
        assert outcome.value["new"] == "of the new version"

        copied_vllm.write_text(stock.replace("ParallelLMHead(", "AnotherHead("))
        outcome = processes.run(start_and_show_mtp, **environ)
        check(outcome, ALL - {"qwen3_5_mtp"}, "qwen3_5_mtp.py: ")
        # Another pull request still edits it, as it is now.
        assert "AnotherHead(" in Path(outcome.value["file"]).read_text()


# ------------------------------------------------------------------------- python -O


def start_optimized() -> dict[str, Any]:
    return {**start(), "optimize": sys.flags.optimize}


@full
def test_optimized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")  # as `python -O`, in children too
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    root = tmp_path / "cache_root"
    with Processes(tmp_path) as processes:
        for _ in range(2):
            outcome = processes.run(start_optimized, VLLM_CACHE_ROOT=str(root))
            check(outcome)
            assert outcome.value["optimize"] == 1
    no_byte_code(root)
