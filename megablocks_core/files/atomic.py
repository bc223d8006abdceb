"""Write, sync, rename, sync the folder: after a crash at any point, all of it or nothing.

A file's bytes are durable once the file is synced, its name once the folder it stands in is.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import IO

from megablocks_core.files import disk

_UNFINISHED, _REMOVED = ".partial", ".removed"


class NewFolder:
    """A folder in the making, beside its target.

    Args:
        target: Where it will appear; missing folders above are made.

    Attributes:
        staging: Where its files are written until then.

    Raises:
        ValueError: ``target`` exists and is not an empty folder.
    """

    def __init__(self, target: Path) -> None:
        check_new(target)
        self.target = target
        self.staging = _beside(target, _UNFINISHED)
        make_folder(target.parent)
        disk.make_folder(self.staging)

    def publish(self) -> None:
        """Sync the folder and rename it to its target, which is refused if no longer empty."""
        sync_folder(self.staging)
        disk.rename(self.staging, self.target)
        sync_folder(self.target.parent)

    def withdraw(self) -> None:
        """Take back a folder that was published, because what had to follow failed."""
        if not self.staging.exists():
            disk.rename(self.target, self.staging)

    def discard(self) -> None:
        """Delete what was written so far; a published folder stays."""
        with suppress(OSError):
            _remove_tree(self.staging)


def check_new(target: Path) -> None:
    """Raise unless a ``NewFolder`` may appear there.

    Raises:
        ValueError: ``target`` exists and is not an empty folder.
    """
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"path={str(target)!r} must be new or an empty folder")


def is_unfinished(path: Path) -> bool:
    """Whether a ``NewFolder`` or a file in the making has this name, which a crash leaves."""
    return path.name.startswith(".") and path.name.endswith(_UNFINISHED)


def is_removed(folder: Path) -> bool:
    """Whether this is a folder that ``remove`` had hidden when a crash came."""
    return folder.name.startswith(".") and folder.name.endswith(_REMOVED)


def remove(folder: Path) -> None:
    """Delete a folder: first its name, so that no one ever finds a part of it under that name.

    What a crash left has a hidden name already; it may be a file.
    """
    if not (is_unfinished(folder) or is_removed(folder)):
        hidden = _beside(folder, _REMOVED)
        disk.rename(folder, hidden)
        sync_folder(folder.parent)
        folder = hidden
    if folder.is_dir() and not folder.is_symlink():
        _remove_tree(folder)
    else:
        disk.remove_file(folder)


def create_file(path: Path, data: bytes) -> None:
    """Write a new file and sync it; its name is durable once the folder is synced."""
    descriptor = disk.create(path)
    try:
        disk.write(descriptor, [memoryview(data)], 0)
        disk.sync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes) -> None:
    """Put a file, old or new, durably in place of what ``path`` names; a reader sees one whole."""
    draft = _beside(path, _UNFINISHED)
    try:
        create_file(draft, data)
        disk.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            disk.remove_file(draft)
        raise
    sync_folder(path.parent)


def make_folder(path: Path) -> None:
    """Make a folder, and those above that are missing, and sync the names."""
    if path.is_dir():
        return
    make_folder(path.parent)
    disk.make_folder(path, exist_ok=True)
    sync_folder(path.parent)


def sync_file(file: IO[bytes]) -> None:
    """Make what was written to an open file durable."""
    file.flush()
    disk.sync(file.fileno())


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        disk.sync(descriptor)
    finally:
        os.close(descriptor)


def _remove_tree(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            _remove_tree(path)
        else:
            disk.remove_file(path)
    disk.remove_folder(folder)


def _beside(path: Path, ending: str) -> Path:
    """A hidden name that nothing has yet, in the same folder."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{ending}")
