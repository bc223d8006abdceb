"""Where checkpoints lie: a folder of a file system, or of a store behind a URL.

Both hold files in folders, and both can make a file durable. A folder of a file system is renamed
when it is whole; a store knows no rename, and there the manifest, put last, makes a folder whole.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from megablocks_core.ckpt.local_place import LocalPlace
from megablocks_core.ckpt.store_place import StorePlace

# At most this many pieces of memory go into one call; the system's limit is 1,024.
MOST_PARTS = 64


class Sink(Protocol):
    """A new file. One thread writes it, front to back."""

    def write(self, parts: Sequence[memoryview], offset: int) -> None:
        """Write ``parts`` one after the other from byte ``offset``, where the last write ended."""
        ...

    def finish(self) -> None:
        """Make what was written durable and close the file."""
        ...

    def close(self) -> None:
        """Close the file, whole or not."""
        ...


class Source(Protocol):
    """A file; threads may read different parts of it at once."""

    @property
    def step(self) -> int:
        """How many bytes are best asked for at once."""
        ...

    @property
    def threads(self) -> int:
        """How many threads are best used to ask."""
        ...

    def read(self, parts: Sequence[memoryview], offset: int) -> None:
        """Fill ``parts`` one after the other with the bytes from ``offset`` on.

        Raises:
            EOFError: The file ends before.
        """
        ...

    def close(self) -> None:
        """Close the file."""
        ...


class FolderDraft(Protocol):
    """A folder in the making."""

    @property
    def staging(self) -> Place:
        """Where its files are written."""
        ...

    def commit(self, name: str, data: bytes) -> None:
        """Write the last file, durably; from then on the folder is there, and whole."""
        ...

    def withdraw(self) -> None:
        """Take back a folder that was committed, because what had to follow failed."""
        ...

    def discard(self) -> None:
        """Delete what is left of the making: all of it, if the folder was not committed."""
        ...


class Place(Protocol):
    """A folder. ``str`` of it is what ``place_of`` makes it from."""

    def child(self, name: str) -> Place:
        """A folder in this one."""
        ...

    def names(self) -> tuple[list[str], list[str]]:
        """Names of the folders in it and of the files in it; nothing of saves in progress."""
        ...

    def leftovers(self) -> list[str]:
        """Names of what saves and removals in progress have in it, or left when killed."""
        ...

    def read(self, name: str) -> bytes | None:
        """A whole file, or ``None`` if there is none."""
        ...

    def size(self, name: str) -> int | None:
        """Bytes in a file, or ``None`` if there is none."""
        ...

    def replace(self, name: str, data: bytes) -> None:
        """Write a file durably in place of the one there, if any; a reader sees one whole."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Write a new file durably."""
        ...

    def delete(self, name: str) -> None:
        """Delete a file, if it is there."""
        ...

    def create(self, name: str) -> Sink:
        """Begin a new file."""
        ...

    def open(self, name: str) -> Source:
        """A file to be read from."""
        ...

    def draft(self, name: str) -> FolderDraft:
        """Begin to make a folder in this one, which is made too if it is missing.

        Raises:
            ValueError: There is a folder of that name, and it is not empty.
        """
        ...

    def remove(self, name: str) -> None:
        """Delete a folder in this one, or a leftover; at no time is it there in part."""
        ...

    def is_link(self, name: str) -> bool:
        """Whether a folder is the link of one that lies elsewhere or has another name."""
        ...

    def is_there(self) -> bool:
        """Whether this machine sees the folder."""
        ...

    def free_bytes(self) -> int | None:
        """Room for new files, or ``None`` where nobody can tell."""
        ...


def place_of(path: str | os.PathLike[str]) -> Place:
    """The place that a caller names: a path, or a URL that fsspec knows.

    Raises:
        ModuleNotFoundError: fsspec, or what it needs for this kind of URL, is not installed.
    """
    if is_url(path):
        return StorePlace.of(str(path))
    return LocalPlace(Path(path).absolute())


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a caller's path is a URL, such as ``s3://bucket/run``."""
    return isinstance(path, str) and "://" in path


def above(path: str | os.PathLike[str]) -> tuple[Place, str]:
    """The place that a folder lies in, and its name."""
    if is_url(path):
        root, _, name = str(path).rstrip("/").rpartition("/")
        return place_of(root), name
    whole = Path(path).absolute()
    return place_of(whole.parent), whole.name


def below(root: str | os.PathLike[str], name: str) -> Path | str:
    """The folder ``name`` in ``root``, in the form in which the caller gave ``root``."""
    return f"{str(root).rstrip('/')}/{name}" if is_url(root) else Path(root) / name
