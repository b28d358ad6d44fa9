# SPDX-License-Identifier: Apache-2.0
"""What other users of the machine can try, as SECURITY.md lists it."""

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_lean_vocab import cache
from vllm_lean_vocab.cache import MANIFEST, Untrusted, cached_plan, key_of
from vllm_lean_vocab.plan import Plan, Status

from . import test_faults
from .processes import Processes
from .starts import load
from .test_faults import (
    NOBODY,
    NONE,
    STEPS,
    as_nobody,
    check,
    entry_of,
    in_child,
    needs_root,
    sound,
    start,
)

KEY, OTHER_KEY = key_of([("vLLM", b"0.32")]), key_of([("vLLM", b"0.33")])
PATH = "vllm/some/file.py"
PLAN = Plan((Status("one", "applies"),), {PATH: "x = 'good'\n"})
EVIL = Plan((Status("one", "applies"),), {PATH: "x = 'evil'\n"})
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may write to, without the sticky bit."""
    folder = Path(tempfile.mkdtemp(prefix="security"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def poison(root: Path) -> None:
    """Make all files of the cache evil, with a manifest that fits them."""
    for entry in root.iterdir():
        manifest = json.loads((entry / MANIFEST).read_text())
        files = dict.fromkeys(manifest["files"], "raise SystemExit('evil')\n")
        shutil.rmtree(entry)
        evil = Plan([Status(*each) for each in manifest["statuses"]], files)
        cache._write(root, entry, evil)


# ------------------------------------------------------- another user beside the cache


def start_after_a_swap() -> dict[str, Any]:
    """Start once another user has put a cache of his own in the place of this one's."""
    root = Path(os.environ["VLLM_CACHE_ROOT"])
    copy = root / "copy"
    shutil.copytree(root / "lean_vocab", copy)
    poison(copy)
    for path in (copy, *copy.rglob("*")):
        os.chown(path, NOBODY, NOBODY)

    def swap() -> None:
        (root / "lean_vocab").rename(root / "away")
        copy.rename(root / "lean_vocab")

    as_nobody(swap)
    return start()


@needs_root
def test_cache_renamed_away_and_replaced(
    processes: Processes, open_folder: Path
) -> None:
    processes.run(load, VLLM_CACHE_ROOT=str(open_folder))
    outcome = processes.run(start_after_a_swap, VLLM_CACHE_ROOT=str(open_folder))
    check(outcome, NONE, f"belongs to another user (uid {NOBODY})")


def swap_at_each_step(prepared: str, by: str) -> int:
    """Exchange the cache folder before each of a start's steps on disk.

    Args:
        prepared: What the folder is before.
        by: What takes its place.

    Returns:
        How many steps there are.

    """
    folder = Path(os.environ["FOLDER"])
    root, evil, precious = (folder / n for n in ("lean_vocab", "evil", "precious"))
    for step in range(1, 200):
        for path in (root, folder / "away", evil, precious):
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)
        if prepared != "cold":
            cached_plan(root, KEY, lambda: PLAN)
        if prepared == "writable":
            root.chmod(0o777)
        cached_plan(evil, KEY, lambda: EVIL)
        for path in (evil, *evil.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
        # A folder of the same user that others may write to; nothing in it is ours.
        (precious / "data").mkdir(parents=True)
        (precious / "data" / "file").write_text("precious")
        precious.chmod(0o777)

        def swap() -> None:
            if root.exists():
                root.rename(folder / "away")
            if by == "link":
                root.symlink_to(precious)
            else:
                (evil if by == "evil" else precious).rename(root)

        status, value = in_child(lambda: plan_and_swap(step, root, swap))  # noqa: B023
        assert status == 0
        files, swapped = value
        assert files in (None, dict(PLAN.files)), (step, files)
        kept = root if by == "precious" and swapped else precious
        assert (kept / "data" / "file").read_text() == "precious", step
        if by == "link":
            assert precious.stat().st_mode & 0o777 == 0o777, step
        if not swapped:
            return step
    raise AssertionError("it doesn't end")


def plan_and_swap(step: int, root: Path, swap: Callable[[], None]) -> Any:
    count, counting = 0, True

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count, counting
        if counting and event in {*STEPS, "fcntl.flock", "os.chmod", "os.listdir"}:
            count += 1
            if count == step:
                counting = False
                swap()

    sys.addaudithook(hook)
    try:
        files = dict(cached_plan(root, KEY, lambda: PLAN)[0].files)
    except (OSError, Untrusted):
        files = None
    swapped, counting = not counting, False
    return files, swapped


@needs_root
@pytest.mark.parametrize("by", ["evil", "link", "precious"])
@pytest.mark.parametrize("prepared", ["cold", "warm", "writable"])
def test_cache_exchanged_at_each_step(
    prepared: str, by: str, processes: Processes, open_folder: Path
) -> None:
    outcome = processes.run(swap_at_each_step, prepared, by, FOLDER=str(open_folder))
    assert outcome.value > (2 if prepared == "warm" else 5)


@needs_root
def test_another_user_can_neither_read_nor_write_the_cache(
    processes: Processes, open_folder: Path
) -> None:
    processes.run(load, VLLM_CACHE_ROOT=str(open_folder))
    tried = processes.run(try_everything, VLLM_CACHE_ROOT=str(open_folder)).value
    assert set(tried.values()) == {"PermissionError"}, tried


def try_everything() -> dict[str, str]:
    entry = entry_of(Path(os.environ["VLLM_CACHE_ROOT"]))
    own = entry.parent.parent / "own"
    attempts: dict[str, Callable[[], Any]] = {
        "list": lambda: os.listdir(entry.parent),
        "read": lambda: (entry / MANIFEST).read_text(),
        "write": lambda: (entry / MANIFEST).write_text("evil"),
        "add": lambda: (entry.parent / "new").mkdir(),
        "rename an entry": lambda: entry.rename(own),
        "link into it": lambda: os.link(own, entry / "evil.py"),
        "link out of it": lambda: os.link(entry / MANIFEST, own.with_name("out")),
        "lock": lambda: os.open(entry.parent, os.O_RDONLY),
        "open up": lambda: entry.parent.chmod(0o777),
    }

    def outcomes() -> dict[str, str]:
        own.write_text("evil")
        found = {}
        for name, attempt in attempts.items():
            try:
                attempt()
                found[name] = "done"
            except OSError as error:
                found[name] = type(error).__name__
        return found

    return dict(as_nobody(outcomes))


@needs_root
def test_hard_link_to_another_users_file(tmp_path: Path) -> None:
    root = tmp_path / "lean_vocab"
    _, entry = cached_plan(root, KEY, lambda: PLAN)
    theirs = tmp_path / "theirs.py"
    # The very content, which its owner could change later.
    theirs.write_bytes((entry / PATH).read_bytes())
    os.chown(theirs, NOBODY, NOBODY)
    (entry / PATH).unlink()
    os.link(theirs, entry / PATH)
    assert cached_plan(root, KEY, lambda: PLAN) == (PLAN, entry)
    assert (entry / PATH).stat().st_uid == os.geteuid()
    assert (entry / PATH).stat().st_nlink == 1


def test_hard_link_to_another_file_of_this_user(tmp_path: Path) -> None:
    root = tmp_path / "lean_vocab"
    _, entry = cached_plan(root, KEY, lambda: PLAN)
    (tmp_path / "other.py").write_text("x = 'evil'\n")
    (entry / PATH).unlink()
    os.link(tmp_path / "other.py", entry / PATH)
    assert cached_plan(root, KEY, lambda: PLAN) == (PLAN, entry)
    assert (tmp_path / "other.py").read_text() == "x = 'evil'\n"


# ------------------------------------------------------------------- what is in it


def test_plan_for_another_vllm(tmp_path: Path) -> None:
    root = tmp_path / "lean_vocab"
    _, other = cached_plan(root, OTHER_KEY, lambda: EVIL)
    other.rename(root / KEY)
    assert cached_plan(root, KEY, lambda: PLAN) == (PLAN, root / KEY)


@pytest.mark.parametrize("mode", [0o700, 0o770, 0o777])
def test_other_things_in_the_folder_are_left_alone(tmp_path: Path, mode: int) -> None:
    root = tmp_path / "lean_vocab"
    for name in (".git", "src", f".{KEY}", KEY[:-1]):
        (root / name).mkdir(parents=True)
        (root / name / "file").write_text(name)
        os.utime(root / name, (0, 0))
    root.chmod(mode)
    assert cached_plan(root, KEY, lambda: PLAN) == (PLAN, root / KEY)
    for name in (".git", "src", f".{KEY}", KEY[:-1]):
        assert (root / name / "file").read_text() == name


# --------------------------------------------------------------- modes of the parents


def start_in_a_group_folder() -> dict[str, Any]:
    root = Path(os.environ["VLLM_CACHE_ROOT"])
    root.mkdir()
    root.chmod(0o2775)
    return start()


def test_parents_that_a_group_may_write_to(
    processes: Processes, open_folder: Path
) -> None:
    root = open_folder / "cache_root"
    outcome = processes.run(start_in_a_group_folder, VLLM_CACHE_ROOT=str(root))
    check(outcome)
    sound(root)


def start_with_umask_0() -> dict[str, Any]:
    os.umask(0)
    return start()


def test_umask_0(processes: Processes, open_folder: Path) -> None:
    root = open_folder / "cache_root"
    outcome = processes.run(start_with_umask_0, VLLM_CACHE_ROOT=str(root))
    check(outcome)
    sound(root)
    # Private, and so is all that others could reach through them.
    for path in (root / "lean_vocab", entry_of(root)):
        assert path.stat().st_mode & 0o777 == 0o700
    for path in entry_of(root).rglob("*"):
        assert path.is_dir() or path.stat().st_mode & 0o777 == 0o600


# ------------------------------------------------------------------------- the page


def test_every_test_that_the_page_names_exists() -> None:
    page = (REPOSITORY / "SECURITY.md").read_text()
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)(?:\[([^`]+)\])?`", page)
    assert len(named) > 20
    faults = {fault.name for fault in test_faults.FAULTS}
    for file, function, fault in named:
        source = (Path(__file__).parent / file).read_text()
        assert f"def {function}(" in source, (file, function)
        assert function != "test_fault" or fault in faults, fault
