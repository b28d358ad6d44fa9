# SPDX-License-Identifier: Apache-2.0
"""The cache: what is read is what was written, by nobody else."""

import errno
import importlib.util
import json
import os
import py_compile
import shutil
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from vllm_lean_vocab import cache, importer
from vllm_lean_vocab.cache import MANIFEST, Untrusted, cached_plan, key_of
from vllm_lean_vocab.plan import Plan, Status

KEY = key_of([("a file", b"its text")])
PATH = "vllm/some/file.py"
PLAN = Plan(
    (Status("one", "applies"), Status("two", "conflict", "reason: `é`")),
    {PATH: "x = 'é'\r\n", "vllm/other.py": "y = 1\n"},
)
ANOTHER_UID = 12345


class Maker:
    """Makes the plan and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Plan:
        self.calls += 1
        return PLAN


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "new" / "lean_vocab"


@pytest.fixture
def entry(root: Path) -> Path:
    """Return an entry of the cache."""
    _, folder = cached_plan(root, KEY, Maker())
    return folder


def check_is_made_anew(root: Path) -> None:
    maker = Maker()
    plan, folder = cached_plan(root, KEY, maker)
    assert (maker.calls, plan) == (1, PLAN)
    # What was made is sound.
    assert cached_plan(root, KEY, maker) == (PLAN, folder)
    assert maker.calls == 1
    assert [path.name for path in root.iterdir()] == [KEY]


# --------------------------------------------------------------------- round trip


def test_round_trip(root: Path) -> None:
    maker = Maker()
    first, folder = cached_plan(root, KEY, maker)
    second, again = cached_plan(root, KEY, maker)
    assert first == second == PLAN
    assert folder == again == root / KEY
    assert maker.calls == 1
    for path, text in PLAN.files.items():
        assert (folder / path).read_bytes() == text.encode()


def test_a_plan_without_files(root: Path) -> None:
    empty = Plan((Status("one", "upstream"),), {})
    for _ in range(2):
        plan, _ = cached_plan(root, KEY, lambda: empty)
        assert plan == empty


def test_only_this_user_can_read_and_write(root: Path) -> None:
    old = os.umask(0)
    try:
        _, folder = cached_plan(root, KEY, Maker())
    finally:
        os.umask(old)
    for path in (root, folder):
        assert path.stat().st_mode & 0o777 == 0o700
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) == 1 + len(PLAN.files)
    for path in files:
        assert path.stat().st_mode & 0o777 == 0o600


def test_nothing_is_left_when_the_plan_fails(root: Path) -> None:
    def fail() -> Plan:
        raise RuntimeError("no plan")

    with pytest.raises(RuntimeError, match="no plan"):
        cached_plan(root, KEY, fail)
    assert list(root.iterdir()) == []


def test_nothing_is_left_when_writing_fails(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(key: str, plan: Plan) -> bytes:
        raise OSError("disk full")

    monkeypatch.setattr(cache, "_manifest_of", full)
    with pytest.raises(OSError, match="disk full"):
        cached_plan(root, KEY, Maker())
    assert list(root.iterdir()) == []


# ------------------------------------------------------------------------ its name


def test_every_input_is_in_the_key() -> None:
    parts: list[tuple[str, bytes | None]] = [("a", b"1"), ("b", b""), ("c", None)]
    keys = {
        key_of(parts),
        key_of([("a", b"2"), *parts[1:]]),  # a content
        key_of([("A", b"1"), *parts[1:]]),  # a name
        key_of([*parts[:1], ("b", None), parts[2]]),  # absent instead of empty
        key_of([*parts[:2], ("c", b"")]),  # empty instead of absent
        key_of(parts[:2]),  # a part less
        key_of([parts[1], parts[0], parts[2]]),  # order
        key_of([("a1", b""), *parts[1:]]),  # a limit between name and content
    }
    assert len(keys) == 8
    assert key_of(iter(parts)) == key_of(parts)
    assert all(key.isalnum() for key in keys)


def test_keys_have_entries_of_their_own(root: Path) -> None:
    other = Plan((), {PATH: "other\n"})
    cached_plan(root, KEY, Maker())
    assert cached_plan(root, key_of([]), lambda: other)[0] == other
    assert cached_plan(root, KEY, Maker())[0] == PLAN


# ------------------------------------------------------------------------- damage


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"statuses": [], "files": null}',
        b'{"statuses": [], "files": []}',
        b'{"statuses": [["one"]], "files": {}}',
        b'{"statuses": 1, "files": {}}',
    ],
)
def test_damaged_manifest(root: Path, entry: Path, content: bytes) -> None:
    (entry / MANIFEST).write_bytes(content)
    check_is_made_anew(root)


def test_changed_file(root: Path, entry: Path) -> None:
    (entry / PATH).write_text("x = 'evil'\n")
    check_is_made_anew(root)


def test_truncated_file(root: Path, entry: Path) -> None:
    (entry / PATH).write_bytes(PLAN.files[PATH].encode()[:4])
    check_is_made_anew(root)


@pytest.mark.parametrize("path", [MANIFEST, PATH, "vllm"])
def test_missing_file(root: Path, entry: Path, path: str) -> None:
    gone = entry / path
    if gone.is_dir():
        shutil.rmtree(gone)
    else:
        gone.unlink()
    check_is_made_anew(root)


def test_folder_in_place_of_a_file(root: Path, entry: Path) -> None:
    (entry / PATH).unlink()
    (entry / PATH).mkdir()
    check_is_made_anew(root)


def test_file_in_place_of_an_entry(root: Path, entry: Path) -> None:
    shutil.rmtree(entry)
    entry.write_text("no folder")
    check_is_made_anew(root)


def test_empty_folder_in_place_of_an_entry(root: Path, entry: Path) -> None:
    shutil.rmtree(entry)
    entry.mkdir(mode=0o700)
    check_is_made_anew(root)


def test_what_a_dead_process_left_is_no_entry(root: Path) -> None:
    left = root / f".{KEY}.1.00000000"
    left.mkdir(parents=True)
    root.chmod(0o700)
    plan, _ = cached_plan(root, KEY, Maker())
    assert plan == PLAN
    assert left.exists()  # it may be somebody's who is still writing
    os.utime(left, (0, 0))
    cached_plan(root, "another", Maker())
    assert not left.exists()


@pytest.mark.parametrize("path", ["", MANIFEST, PATH])
def test_links_are_not_followed(
    root: Path, entry: Path, path: str, tmp_path: Path
) -> None:
    # To what would be a sound entry.
    aside = tmp_path / "elsewhere"
    (entry / path).rename(aside)
    (entry / path).symlink_to(aside)
    before = sorted(tmp_path.glob("elsewhere/**/*"))
    check_is_made_anew(root)
    assert not (entry / path).is_symlink()
    assert aside.exists()
    assert sorted(tmp_path.glob("elsewhere/**/*")) == before


def test_a_poisoned_pyc_changes_nothing(
    root: Path, entry: Path, tmp_path: Path
) -> None:
    source = entry / PATH
    evil = tmp_path / "evil.py"
    evil.write_text("x = 'evil'\n")
    py_compile.compile(
        str(evil),
        importlib.util.cache_from_source(str(source)),
        # Such a file is taken without a look at the source.
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )
    ordinary = importlib.util.spec_from_file_location("vllm.some.file", source)
    plan, folder = cached_plan(root, KEY, Maker())
    patched = importer.PatchedFinder(folder, plan.files).find_spec("vllm.some.file")
    assert _x_of(ordinary) == "evil"
    assert _x_of(patched) == "é"


def _x_of(spec: ModuleSpec | None) -> str:
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.x)


# -------------------------------------------------------------------- other users

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can give files away"
)


@needs_root
@pytest.mark.parametrize("path", ["", "vllm", MANIFEST, PATH])
def test_what_another_user_owns_is_made_anew(
    root: Path, entry: Path, path: str
) -> None:
    os.chown(entry / path, ANOTHER_UID, -1)
    if path == "vllm":  # nobody else can write to the folder above it
        assert cached_plan(root, KEY, Maker()) == (PLAN, entry)
    else:
        check_is_made_anew(root)


@needs_root
def test_a_root_that_another_user_owns_is_refused(root: Path, entry: Path) -> None:
    os.chown(root, ANOTHER_UID, -1)
    maker = Maker()
    with pytest.raises(Untrusted, match=f"another user.*{ANOTHER_UID}"):
        cached_plan(root, KEY, maker)
    assert maker.calls == 0


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_root_that_others_may_write_to_is_emptied_and_made_private(
    root: Path, entry: Path, mode: int
) -> None:
    (root / "planted").write_text("x = 'evil'")
    root.chmod(mode)
    maker = Maker()
    assert cached_plan(root, KEY, maker) == (PLAN, entry)
    assert maker.calls == 1
    assert root.stat().st_mode & 0o777 == 0o700
    # What has another name is never looked at; it may be the user's own.
    assert {path.name for path in root.iterdir()} == {KEY, "planted"}


@pytest.mark.parametrize("path", ["", MANIFEST, PATH])
def test_what_others_may_write_to_is_made_anew(
    root: Path, entry: Path, path: str
) -> None:
    os.chmod(entry / path, 0o722)
    check_is_made_anew(root)


def test_a_root_that_is_a_link_is_refused(
    root: Path, entry: Path, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(root)
    with pytest.raises(Untrusted):
        cached_plan(link, KEY, Maker())


def test_a_root_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError):
            cached_plan(root, KEY, Maker())


def test_a_root_that_cannot_be_written(
    root: Path, entry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(path: Path, *args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "rename", read_only)
    with pytest.raises(OSError, match="Read-only"):
        cached_plan(root, key_of([]), Maker())
    # What is there can still be used.
    assert cached_plan(root, KEY, Maker()) == (PLAN, entry)


# ----------------------------------------------------------------- many processes

# Does what the plugin does, and says how often it made the plan.
PLANNER = """
import importlib.util, json, sys
from pathlib import Path
from vllm_lean_vocab import cache, plan
from vllm_lean_vocab.series import SERIES

root, key = Path(sys.argv[1]), sys.argv[2]
vllm = Path(importlib.util.find_spec("vllm").submodule_search_locations[0]).parent
paths = plan.source_paths(SERIES)
sources = {p: (vllm / p).read_text() if (vllm / p).exists() else None for p in paths}
made = []
def make():
    made.append(1)
    return plan.make_plan(sources, SERIES)
result, folder = cache.cached_plan(root, key, make)
print(json.dumps([len(made), str(folder), result]))
"""

# The same with a small plan, for each of many entries.
REPAIRER = """
import json, sys
from pathlib import Path
from vllm_lean_vocab import cache
from vllm_lean_vocab.plan import Plan, Status

plan = Plan((Status("one", "applies"),), {"a/b.py": "x = 1\\n"})
for key in sys.argv[2:]:
    result, _ = cache.cached_plan(Path(sys.argv[1]), key, lambda: plan)
    assert result == plan
print(json.dumps("sound"))
"""


def in_many_processes(count: int, script: str, *arguments: str) -> list[Any]:
    command = [sys.executable, "-c", script, *arguments]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(count)
    ]
    outputs = [process.communicate(timeout=120) for process in running]
    for process, (_, error) in zip(running, outputs, strict=True):
        assert process.returncode == 0, error.decode()
    return [json.loads(output) for output, _ in outputs]


def test_many_processes_at_once_on_a_cold_cache(root: Path) -> None:
    results = in_many_processes(6, PLANNER, str(root), KEY)
    assert len({json.dumps(result[1:]) for result in results}) == 1
    assert sum(made for made, *_ in results) >= 1  # most wait for it
    assert [path.name for path in root.iterdir()] == [KEY]
    assert [made for made, *_ in in_many_processes(1, PLANNER, str(root), KEY)] == [0]


def test_many_processes_at_once_on_a_damaged_cache(root: Path) -> None:
    keys = [key_of([(str(number), b"")]) for number in range(40)]
    for key in keys:
        _, folder = cached_plan(root, key, Maker())
        (folder / MANIFEST).write_text("{")
    results = in_many_processes(6, REPAIRER, str(root), *keys)
    assert results == ["sound"] * 6
    assert sorted(path.name for path in root.iterdir()) == sorted(keys)


def test_an_entry_written_meanwhile_by_another_process(root: Path) -> None:
    def slowly() -> Plan:
        cached_plan(root, KEY, Maker())
        return PLAN

    assert cached_plan(root, KEY, slowly) == (PLAN, root / KEY)
    assert [path.name for path in root.iterdir()] == [KEY]


def test_an_entry_discarded_meanwhile_by_another_process(root: Path) -> None:
    # It found the entry damaged before this process replaced it.
    def then_discarded() -> Plan:
        cached_plan(root, KEY, Maker())
        return PLAN

    real_read = cache._read
    reads = 0

    def read(folder: Path) -> Plan:
        nonlocal reads
        reads += 1
        if reads == 2:
            cache._discard(str(folder))
        return real_read(folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "_read", read)
        assert cached_plan(root, KEY, then_discarded) == (PLAN, root / KEY)
