# SPDX-License-Identifier: Apache-2.0
"""Keeps plans on disk, so that LibCST runs once per machine and vLLM version.

A plan lies in a folder named after everything it was made from. It is written beside
its place and moved there in one step; what is read is checked against the manifest's
hashes, and folders and files that another user could have written are not used. The
patched sources are real files, so that tracebacks show the code that runs.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from vllm_lean_vocab.plan import Plan, Status

MANIFEST = "manifest.json"
ATTEMPTS = 4
# In seconds.
PATIENCE = 5.0
STALE = 3600.0
# An entry, or one that is being written or removed. The folder may be one that holds
# other things as well, and nothing else is ever touched.
OURS = re.compile(r"[0-9a-f]{32}|\.[0-9a-f]{32}\.\d+\.[0-9a-f]{8}")
OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


class Untrusted(Exception):
    """A cached file or folder is damaged, or another user could have written it."""


def key_of(parts: Iterable[tuple[str, bytes | None]]) -> str:
    """Return a name for what is made from the parts.

    Args:
        parts: Name and content of each; None where it doesn't exist.

    """
    digest = hashlib.sha256()
    for name, content in parts:
        for part in (name.encode(), content if content is not None else b"\0absent"):
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
    return digest.hexdigest()[:32]


def cached_plan(root: Path, key: str, make: Callable[[], Plan]) -> tuple[Plan, Path]:
    """Return the plan of this key, made and kept if it isn't there yet.

    A damaged entry is made anew. Several processes may do this at once.

    Args:
        root: The cache folder; created if need be.
        key: What `key_of` returned.
        make: Makes the plan.

    Returns:
        The plan, and the folder that holds its files.

    Raises:
        OSError: The cache can't be written.
        Untrusted: What lies there belongs to another user, or can't be replaced.

    """
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    _make_private(root)
    folder = root / key
    made: Plan | None = None
    problem: Exception | None = None
    # More than once: a process that found a damaged entry may discard a good one.
    for _ in range(ATTEMPTS):
        if not os.path.lexists(folder):
            with _alone(root):
                if not os.path.lexists(folder):
                    made = made or make()
                    _write(root, folder, made)
        try:
            return _read(folder), folder
        except Exception as error:  # whatever is wrong with it, it is made anew
            problem = error
            try:
                _discard(os.fspath(folder))
            except OSError as stuck:
                raise Untrusted(f"{error}; and it stays there: {stuck}") from error
    raise Untrusted(f"{folder}: can't be made anew: {problem}") from problem


class State(NamedTuple):
    """What is known of a cache folder.

    Attributes:
        exists: Whether it is there.
        problem: Why it is not used; empty if it is.
        writable: Whether this user may write to it, or make it.
        entries: How many plans it holds.
        mib: MiB of all files in it.

    """

    exists: bool
    problem: str
    writable: bool
    entries: int
    mib: float


def inspect(root: Path) -> State:
    """Look at a cache folder, and change nothing.

    Args:
        root: The folder.

    """
    there = next(path for path in (root, *root.parents) if os.path.lexists(path))
    writable = os.access(there, os.W_OK | os.X_OK)
    problem = "" if writable else f"{there}: can't be written by uid {os.geteuid()}"
    exists = there == root
    if exists:
        try:
            _check_owner(os.lstat(root), root, stat.S_ISDIR)
        except Untrusted as error:
            problem = str(error)
    elif not there.is_dir():
        problem = f"{there}: not a plain file or folder"
    sizes = []
    for folder, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(OSError):  # e.g. gone meanwhile
                sizes.append(os.lstat(os.path.join(folder, name)).st_size)
    entries = len(list(root.glob(f"[!.]*/{MANIFEST}")))
    return State(exists, problem, writable, entries, sum(sizes) / 2**20)


def _make_private(root: Path) -> None:
    """Shut others out of a folder of ours that they could write to.

    Volumes that are mounted for a group come like that anew each time. What lies there
    is not used.
    """
    status = os.lstat(root)
    ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if ours and status.st_mode & OTHERS_MAY_WRITE:
        # By descriptor: by now the name may stand for another folder of this user.
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if not os.path.samestat(status, os.fstat(descriptor)):
                raise Untrusted(f"{root}: was exchanged meanwhile")
            os.fchmod(descriptor, 0o700)
            for name in filter(OURS.fullmatch, os.listdir(descriptor)):
                _discard(name, descriptor)
        finally:
            os.close(descriptor)
    _check_owner(os.lstat(root), root, stat.S_ISDIR)


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Let one process at a time make a plan; the others find it made.

    It only saves work, so whoever waits for long goes on without it.
    """
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.02)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        os.close(descriptor)  # which unlocks, as the end of the process does


def _read(folder: Path) -> Plan:
    _check_owner(os.lstat(folder), folder, stat.S_ISDIR)
    manifest = json.loads(_read_file(folder / MANIFEST))
    if manifest["key"] != folder.name:
        raise Untrusted(f"{folder}: made for {manifest['key']}")
    files: dict[str, str] = {}
    for path, digest in manifest["files"].items():
        content = _read_file(folder / path)
        if hashlib.sha256(content).hexdigest() != digest:
            raise Untrusted(f"{folder / path}: not what was written there")
        files[path] = content.decode("utf-8")
    return Plan(tuple(Status(*status) for status in manifest["statuses"]), files)


def _read_file(path: Path) -> bytes:
    # Checked and read through one descriptor: it can't be exchanged in between.
    with open(path, "rb", opener=_open_without_links) as file:
        _check_owner(os.fstat(file.fileno()), path, stat.S_ISREG)
        return file.read()


def _open_without_links(path: str, flags: int) -> int:
    # Non-blocking: a named pipe would be waited for, before it can be looked at.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _check_owner(
    status: os.stat_result, path: Path, has_kind: Callable[[int], bool]
) -> None:
    if not has_kind(status.st_mode):
        raise Untrusted(f"{path}: not a plain file or folder")
    if status.st_uid != os.geteuid():
        raise Untrusted(f"{path}: belongs to another user (uid {status.st_uid})")
    if status.st_mode & OTHERS_MAY_WRITE:
        raise Untrusted(f"{path}: others may write to it (chmod go-w)")


def _write(root: Path, folder: Path, plan: Plan) -> None:
    for left in root.glob(".*"):  # by a process that was killed
        if not OURS.fullmatch(left.name):
            continue
        with contextlib.suppress(OSError):  # or by one that is about to remove it
            if left.lstat().st_mtime < time.time() - STALE:
                shutil.rmtree(left, ignore_errors=True)
    aside = root / _aside(folder.name)
    aside.mkdir(mode=0o700)
    try:
        for path, text in plan.files.items():
            _write_file(aside, path, text.encode("utf-8"))
        # Last: a folder without it is not an entry.
        _write_file(aside, MANIFEST, _manifest_of(folder.name, plan))
        try:
            aside.rename(folder)
        except OSError:
            # Another process was first; what it wrote is checked when it is read.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_file(folder: Path, path: str, content: bytes) -> None:
    file_path = folder / path
    file_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(file_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)


def _manifest_of(key: str, plan: Plan) -> bytes:
    files: Mapping[str, str] = {
        path: hashlib.sha256(text.encode("utf-8")).hexdigest()
        for path, text in plan.files.items()
    }
    statuses = [list(status) for status in plan.statuses]
    content = {"key": key, "statuses": statuses, "files": files}
    return json.dumps(content, indent=1).encode()


def _aside(name: str) -> str:
    return f".{name.lstrip('.')[:32]}.{os.getpid()}.{secrets.token_hex(4)}"


def _discard(name: str, folder: int | None = None) -> None:
    """Move an entry away in one step, then remove it.

    Args:
        name: Its path, relative to the folder if that is given.
        folder: Descriptor of the folder that it is in.

    """
    head, tail = os.path.split(name)
    aside = os.path.join(head, _aside(tail))
    try:
        os.rename(name, aside, src_dir_fd=folder, dst_dir_fd=folder)
    except FileNotFoundError:  # another process was first
        return
    try:
        os.unlink(aside, dir_fd=folder)
    except (IsADirectoryError, PermissionError):
        shutil.rmtree(aside, ignore_errors=True, dir_fd=folder)
