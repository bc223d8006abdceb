"""Where checkpoints lie: a folder of a file system, or of a store behind a URL.

Both hold files in folders, and both can make a file durable. A folder of a file system is renamed
when it is whole; a store knows no rename, and there the manifest, put last, makes a folder whole.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from megablocks_core.ckpt.arguments import check_name, check_path
from megablocks_core.ckpt.places.local_place import LocalPlace
from megablocks_core.ckpt.places.store_place import StorePlace

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

    def is_file(self) -> bool:
        """Whether there is something else than a folder in its place."""
        ...

    def free_bytes(self) -> int | None:
        """Room for new files, or ``None`` where nobody can tell."""
        ...


def place_of(path: str | os.PathLike[str], *, name: str = "path") -> Place:
    """The place that a caller names: a path, or a URL that fsspec knows.

    Args:
        path: What the caller gave.
        name: What the caller calls it.

    Raises:
        ValueError: It is neither, or a URL of an unknown kind.
        ModuleNotFoundError: fsspec, or what it needs for this kind of URL, is not installed.
    """
    text = check_path(path, name)
    if is_url(path):
        return StorePlace.of(text)
    return LocalPlace(Path(text).absolute())


def root_of(root: str | os.PathLike[str]) -> Place:
    """The place of a run's checkpoints, which may not be there yet.

    Raises:
        ValueError: It is none, or a file lies there.
    """
    place = place_of(root, name="root")
    if place.is_file():
        raise ValueError(f"root={str(root)!r} must be a folder, and is none")
    return place


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a caller's path is a URL, such as ``s3://bucket/run``."""
    return isinstance(path, str) and "://" in path


def above(path: str | os.PathLike[str]) -> tuple[Place, str]:
    """The place that a checkpoint's folder lies in, and its name.

    Raises:
        ValueError: ``path`` is none, or nobody would find a folder of this name.
    """
    text = check_path(path)
    if is_url(path):
        root, _, name = text.rstrip("/").rpartition("/")
        if not is_url(root):
            raise ValueError(f"path={text!r} must name a folder in a store, not a store")
        return place_of(root), check_name(name, text)
    whole = Path(text).absolute()
    return place_of(whole.parent), check_name(whole.name, text)


def below(root: str | os.PathLike[str], name: str) -> Path | str:
    """The folder ``name`` in ``root``, in the form in which the caller gave ``root``."""
    return f"{str(root).rstrip('/')}/{name}" if is_url(root) else Path(root) / name
