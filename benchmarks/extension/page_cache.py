# SPDX-License-Identifier: Apache-2.0
"""What of a file is in the kernel's page cache, and how to change that."""

import ctypes
import mmap
import os
from pathlib import Path

AT_ONCE = 16 * 2**20


def resident(file: Path) -> int:
    """Return how many bytes of a file are in the page cache, as whole pages.

    The file has to be this user's: of others the kernel says that all of them are.

    Raises:
        OSError: If it can't be read, or if the kernel does not say.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    # A mapping that can be written to, because only such a one gives its address.
    with (
        file.open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) as mapped,
    ):
        pages = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(mapped)
        address = ctypes.c_void_p(ctypes.addressof(first))
        failed = libc.mincore(address, ctypes.c_size_t(len(mapped)), pages)
        del first  # or the mapping can't be closed
    if failed:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(file))
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def drop(file: Path) -> None:
    """Ask the kernel to drop a file from the page cache.

    It keeps pages that a process has mapped, and all of a file that is in memory only.

    Raises:
        OSError: If it can't be read.
    """
    with file.open("rb") as opened:
        os.fsync(opened.fileno())  # what isn't written yet is kept
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fill(file: Path) -> None:
    """Read a file into the page cache.

    Raises:
        OSError: If it can't be read.
    """
    with file.open("rb", buffering=0) as opened:
        while opened.read(AT_ONCE):
            pass
