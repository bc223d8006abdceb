"""A folder of this machine's file systems (disks, tmpfs, NFS)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megablocks_core.files import (
    NewFolder,
    create_file,
    disk,
    is_removed,
    is_unfinished,
    remove,
    replace_file,
)


class LocalPlace:
    """A ``Place``; what is being made in it has hidden names."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def child(self, name: str) -> LocalPlace:
        """A folder in this one."""
        return LocalPlace(self.path / name)

    def names(self) -> tuple[list[str], list[str]]:
        """Names of folders and of files, without hidden ones."""
        if not self.is_there():
            return [], []
        paths = sorted(path for path in self.path.iterdir() if not path.name.startswith("."))
        folders = [path.name for path in paths if path.is_dir()]
        return folders, [path.name for path in paths if path.is_file()]

    def leftovers(self) -> list[str]:
        """Names of staging folders, files in the making, and folders half removed."""
        if not self.is_there():
            return []
        paths = sorted(self.path.iterdir())
        return [path.name for path in paths if is_unfinished(path) or is_removed(path)]

    def read(self, name: str) -> bytes | None:
        """A whole file, or ``None`` if there is none."""
        path = self.path / name
        return path.read_bytes() if path.is_file() else None

    def size(self, name: str) -> int | None:
        """Bytes in a file, or ``None`` if there is none."""
        path = self.path / name
        return path.stat().st_size if path.is_file() else None

    def put(self, name: str, data: bytes) -> None:
        """Write a new file durably; its name is durable once the folder is committed."""
        create_file(self.path / name, data)

    def replace(self, name: str, data: bytes) -> None:
        """Write a file durably in place of the one there, if any."""
        replace_file(self.path / name, data)

    def delete(self, name: str) -> None:
        """Delete a file, if it is there."""
        if (self.path / name).exists():
            disk.remove_file(self.path / name)

    def create(self, name: str) -> LocalSink:
        """Begin a new file."""
        return LocalSink(self.path / name)

    def open(self, name: str) -> LocalSource:
        """A file to be read from."""
        return LocalSource(self.path / name)

    def draft(self, name: str) -> LocalDraft:
        """Begin to make a folder, beside where it will be."""
        return LocalDraft(NewFolder(self.path / name))

    def remove(self, name: str) -> None:
        """Hide a folder and delete it."""
        remove(self.path / name)

    def is_link(self, name: str) -> bool:
        """Whether a name is a symbolic link."""
        return (self.path / name).is_symlink()

    def is_there(self) -> bool:
        """Whether this machine sees the folder."""
        return self.path.is_dir()

    def is_file(self) -> bool:
        """Whether a file, or a link to nothing, lies in its place."""
        return os.path.lexists(self.path) and not self.path.is_dir()

    def free_bytes(self) -> int | None:
        """Room for new files of this user; ``None`` where the file system does not count it."""
        path = self.path
        while not path.exists():
            path = path.parent
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize if found.f_blocks else None

    def __str__(self) -> str:
        return str(self.path)


class LocalDraft:
    """A ``FolderDraft``: a folder with a hidden name, renamed when it is whole."""

    def __init__(self, folder: NewFolder) -> None:
        self._folder = folder
        self.staging = LocalPlace(folder.staging)

    def commit(self, name: str, data: bytes) -> None:
        """Write the last file, sync and rename."""
        self.staging.put(name, data)
        self._folder.publish()

    def withdraw(self) -> None:
        """Give the folder its hidden name again."""
        self._folder.withdraw()

    def discard(self) -> None:
        """Delete the hidden folder, if there is one."""
        self._folder.discard()


class LocalSink:
    """A ``Sink``."""

    def __init__(self, path: Path) -> None:
        self._descriptor = disk.create(path)

    def write(self, parts: Sequence[memoryview], offset: int) -> None:
        """Write, and have the system begin to make it durable."""
        disk.write(self._descriptor, parts, offset)
        disk.begin_sync(self._descriptor, offset, sum(part.nbytes for part in parts))

    def finish(self) -> None:
        """Sync and close."""
        disk.sync(self._descriptor)
        self.close()

    def close(self) -> None:
        """Close the file, whole or not."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class LocalSource:
    """A ``Source``."""

    # What was read is hashed next: it should still be in a core's cache.
    step = 2**19
    threads = 3

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, parts: Sequence[memoryview], offset: int) -> None:
        """Fill ``parts`` from ``offset`` on."""
        waiting = [part for part in parts if part.nbytes]
        while waiting:
            done = os.preadv(self._descriptor, waiting, offset)
            if not done:
                raise EOFError(f"{self._path} ends before byte {offset + 1}")
            offset += done
            while waiting and done >= waiting[0].nbytes:
                done -= waiting.pop(0).nbytes
            if done:
                waiting[0] = waiting[0][done:]

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)
