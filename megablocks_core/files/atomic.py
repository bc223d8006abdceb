"""Write, sync, rename, sync the folder: after a crash at any point, all of it or nothing.

A file's bytes are durable once the file is synced, its name once the folder it stands in is.
"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import IO

_UNFINISHED = ".partial"


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
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise ValueError(f"path={str(target)!r} must be new or an empty folder")
        self.target = target
        self.staging = _beside(target, _UNFINISHED)
        make_folder(target.parent)
        self.staging.mkdir()

    def publish(self) -> None:
        """Sync the folder and rename it to its target, which is refused if no longer empty."""
        sync_folder(self.staging)
        self.staging.rename(self.target)
        sync_folder(self.target.parent)

    def withdraw(self) -> None:
        """Take back a folder that was published, because what had to follow failed."""
        if not self.staging.exists():
            self.target.rename(self.staging)

    def discard(self) -> None:
        """Delete what was written so far; a published folder stays."""
        shutil.rmtree(self.staging, ignore_errors=True)


def is_unfinished(folder: Path) -> bool:
    """Whether this is the staging of a ``NewFolder``, which a crash leaves behind."""
    return folder.name.startswith(".") and folder.name.endswith(_UNFINISHED)


def create_file(path: Path, data: bytes) -> None:
    """Write a new file and sync it; its name is durable once the folder is synced."""
    with open(path, "xb") as file:
        file.write(data)
        sync_file(file)


def replace_file(path: Path, data: bytes) -> None:
    """Put a file, old or new, durably in place of what ``path`` names; a reader sees one whole."""
    draft = _beside(path)
    try:
        create_file(draft, data)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(path.parent)


def make_folder(path: Path) -> None:
    """Make a folder, and those above that are missing, and sync the names."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync_folder(path.parent)


def sync_file(file: IO[bytes]) -> None:
    """Make what was written to an open file durable."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _beside(path: Path, ending: str = "") -> Path:
    """A hidden name that nothing has yet, in the same folder."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{ending}")
