"""Where checkpoints lie: a folder, the files in it and the folders beside it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megablocks_core.files import create_file, disk, replace_file

# At most this many pieces of memory go into one call; the system's limit is 1,024.
MOST_PARTS = 64


class LocalPlace:
    """A folder of this machine's file systems (disks, tmpfs, NFS)."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def child(self, name: str) -> LocalPlace:
        """A folder in this one."""
        return LocalPlace(self.path / name)

    def read(self, name: str) -> bytes | None:
        """A whole file, or ``None`` if there is none."""
        path = self.path / name
        return path.read_bytes() if path.is_file() else None

    def size(self, name: str) -> int | None:
        """Bytes in a file, or ``None`` if there is none."""
        path = self.path / name
        return path.stat().st_size if path.is_file() else None

    def put(self, name: str, data: bytes) -> None:
        """Write a new file durably."""
        create_file(self.path / name, data)

    def replace(self, name: str, data: bytes) -> None:
        """Write a file durably in place of the one there, if any; a reader sees one whole."""
        replace_file(self.path / name, data)

    def create(self, name: str) -> LocalSink:
        """Begin a new file, of which any part may be written at any time."""
        return LocalSink(self.path / name)

    def open(self, name: str) -> LocalSource:
        """A file to be read from."""
        return LocalSource(self.path / name)

    def __str__(self) -> str:
        return str(self.path)


class LocalSink:
    """A new file; threads may write different parts of it at once."""

    def __init__(self, path: Path) -> None:
        self._descriptor = disk.create(path)

    def write(self, parts: Sequence[memoryview], offset: int) -> None:
        """Write ``parts`` one after the other from byte ``offset`` on."""
        disk.write(self._descriptor, parts, offset)
        disk.begin_sync(self._descriptor, offset, sum(part.nbytes for part in parts))

    def finish(self) -> None:
        """Make what was written durable and close the file."""
        disk.sync(self._descriptor)
        self.close()

    def close(self) -> None:
        """Close the file, whole or not."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class LocalSource:
    """A file; threads may read different parts of it at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, parts: Sequence[memoryview], offset: int) -> None:
        """Fill ``parts`` one after the other with the bytes from ``offset`` on.

        Raises:
            EOFError: The file ends before.
        """
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

    def __enter__(self) -> LocalSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def place_of(path: str | os.PathLike[str]) -> LocalPlace:
    """The place that a caller names."""
    return LocalPlace(Path(path).absolute())
