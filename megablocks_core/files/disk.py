"""The calls that change a file system: everything that must survive a crash goes through them.

Callers say ``disk.write(...)``, so that a test can put a recorder, or a fault, in place of each.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def create(path: Path) -> int:
    """Make a new file and return its descriptor; ``FileExistsError`` if there is one."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def write(descriptor: int, parts: Sequence[memoryview], offset: int) -> None:
    """Write ``parts`` one after the other from byte ``offset`` on, all of them or an error."""
    waiting = [part for part in parts if part.nbytes]
    while waiting:
        done = os.pwritev(descriptor, waiting, offset)
        if not done:
            raise OSError(errno.EIO, "the file system wrote nothing and gave no reason")
        offset += done
        while waiting and done >= waiting[0].nbytes:
            done -= waiting.pop(0).nbytes
        if done:
            waiting[0] = waiting[0][done:]


def begin_sync(descriptor: int, offset: int, length: int) -> None:
    """Have the system begin to make a range durable, where it can be told to; waits for nothing."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # a hint; what fails for good, ``sync`` will say
            os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)


def sync(descriptor: int) -> None:
    """Make what was written to a file, or the names in a folder, durable."""
    os.fsync(descriptor)


def rename(old: Path, new: Path) -> None:
    """Give a file or folder another name, of which an empty folder may stand in the way."""
    os.rename(old, new)


def replace(old: Path, new: Path) -> None:
    """Give a file the name of another, which is gone at the same moment."""
    os.replace(old, new)


def make_folder(path: Path, *, exist_ok: bool = False) -> None:
    """Make a folder in one that is there."""
    path.mkdir(exist_ok=exist_ok)


def remove_file(path: Path) -> None:
    """Take a file's name away."""
    os.unlink(path)


def remove_folder(path: Path) -> None:
    """Take an empty folder away."""
    os.rmdir(path)
