"""A folder of a store behind a URL (``s3://``, ``gs://``, ``file://``), through fsspec.

A store has no rename, may list late what was put or deleted, and puts a file whole or not at all.
So files are written under their last names, and the manifest is put after all others. While a
folder NAME is made or deleted, a file ``.NAME.partial`` lies beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from megablocks_core.ckpt.manifest import BLOCK_BYTES, MANIFEST

_MARK = ".partial"


class StorePlace:
    """A ``Place``.

    Args:
        system: fsspec's file system.
        path: The folder, as the file system names it.
        url: The folder, as callers name it.
    """

    def __init__(self, system: Any, path: str, url: str) -> None:
        self._system, self._path, self._url = system, path.rstrip("/"), url.rstrip("/")

    @classmethod
    def of(cls, url: str) -> StorePlace:
        """The folder that a URL names; fsspec is imported here.

        Raises:
            ValueError: fsspec does not know this kind of URL.
            ModuleNotFoundError: fsspec, or what it needs for this kind of URL, is not installed.
        """
        try:
            import fsspec.core
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{url} needs fsspec: pip install 'megablocks-core[remote]'"
            ) from error
        try:
            system, path = fsspec.core.url_to_fs(url)
        except ImportError as error:
            raise ModuleNotFoundError(f"{url} needs what is not installed: {error}") from error
        except ValueError as error:
            raise ValueError(f"path={url!r} must be a URL that fsspec knows: {error}") from error
        return cls(system, path, url)

    def child(self, name: str) -> StorePlace:
        """A folder in this one."""
        return StorePlace(self._system, f"{self._path}/{name}", f"{self._url}/{name}")

    def names(self) -> tuple[list[str], list[str]]:
        """Names of folders and of files; no hidden ones, and no folders that are in the making."""
        folders, files = self._listed()
        marked = {_marked(name) for name in files if _is_mark(name)}
        folders = [
            name for name in folders if name not in marked or self.child(name).size(MANIFEST)
        ]
        return folders, [name for name in files if not name.startswith(".")]

    def leftovers(self) -> list[str]:
        """Names of the marks of folders in the making or being deleted."""
        return [name for name in self._listed()[1] if _is_mark(name)]

    def read(self, name: str) -> bytes | None:
        """A whole file, or ``None`` if there is none."""
        try:
            return bytes(self._system.cat_file(self._file(name)))
        except FileNotFoundError:
            return None

    def size(self, name: str) -> int | None:
        """Bytes in a file, or ``None`` if there is none."""
        self._system.invalidate_cache()
        try:
            found = self._system.info(self._file(name))
        except FileNotFoundError:
            return None
        return found["size"] if found["type"] == "file" else None

    def put(self, name: str, data: bytes) -> None:
        """Put a file."""
        self._system.pipe_file(self._file(name), data)

    def replace(self, name: str, data: bytes) -> None:
        """Put a file in place of the one there."""
        self.put(name, data)

    def delete(self, name: str) -> None:
        """Delete a file, if it is there."""
        with suppress(FileNotFoundError):
            self._system.rm_file(self._file(name))

    def create(self, name: str) -> StoreSink:
        """Begin a new file."""
        return StoreSink(self._system.open(self._file(name), "wb"))

    def open(self, name: str) -> StoreSource:
        """A file to be read from."""
        return StoreSource(self._system, self._file(name))

    def draft(self, name: str) -> StoreDraft:
        """Begin to make a folder; what a killed save left under its name is deleted."""
        folder, mark = self.child(name), f".{name}{_MARK}"
        if folder.size(MANIFEST) is None and self.size(mark) is not None:
            self.remove(mark)
        folders, files = folder._listed()
        there = [file for file in [MANIFEST, *files] if folder.size(file) is not None]
        if folders or there:
            raise ValueError(f"path={str(folder)!r} must be new or an empty folder")
        self._system.makedirs(folder._path, exist_ok=True)
        self.put(mark, b"partial")
        return StoreDraft(self, name)

    def remove(self, name: str) -> None:
        """Delete a folder, its manifest first, or what is left under a mark."""
        folder = self.child(_marked(name) if _is_mark(name) else name)
        mark = f".{folder._path.rpartition('/')[2]}{_MARK}"
        if not _is_mark(name):
            self.put(mark, b"partial")
            folder.delete(MANIFEST)
        if folder.size(MANIFEST) is None:
            folder.clear()
        self.delete(mark)

    def clear(self) -> None:
        """Delete all files that are listed, and the folder itself where stores have folders."""
        for file in self._listed()[1]:
            self.delete(file)
        with suppress(OSError):
            self._system.rmdir(self._path)

    def is_link(self, name: str) -> bool:
        """A store has no links."""
        return False

    def is_there(self) -> bool:
        """A store has every folder."""
        return True

    def is_file(self) -> bool:
        """Whether a file has the folder's name."""
        root, _, name = self._path.rpartition("/")
        return bool(root) and StorePlace(self._system, root, "").size(name) is not None

    def free_bytes(self) -> int | None:
        """Nobody can tell."""
        return None

    def __str__(self) -> str:
        return self._url

    def _file(self, name: str) -> str:
        return f"{self._path}/{name}"

    def _listed(self) -> tuple[list[str], list[str]]:
        self._system.invalidate_cache()
        try:
            found = self._system.ls(self._path, detail=True)
        except FileNotFoundError:
            return [], []
        names: tuple[list[str], list[str]] = ([], [])
        for one in found:
            name = one["name"].rstrip("/").rpartition("/")[2]
            if name and one["name"].rstrip("/") != self._path:
                names[one["type"] != "directory"].append(name)
        return sorted(names[0]), sorted(names[1])


class StoreDraft:
    """A ``FolderDraft``: a marked folder without a manifest."""

    def __init__(self, root: StorePlace, name: str) -> None:
        self._root, self._name = root, name
        self.staging = root.child(name)
        self._is_whole = False

    def commit(self, name: str, data: bytes) -> None:
        """Put the manifest."""
        self.staging.put(name, data)
        self._is_whole = True

    def withdraw(self) -> None:
        """Delete the manifest."""
        self.staging.delete(MANIFEST)
        self._is_whole = False

    def discard(self) -> None:
        """Delete the mark of a folder that was committed, else the folder.

        Then the mark stays, for files may be there that are not listed yet: the next save under
        the name, or ``prune``, deletes them.
        """
        with suppress(OSError):
            if self._is_whole:
                self._root.delete(f".{self._name}{_MARK}")
            else:
                self.staging.delete(MANIFEST)  # a put that failed may have arrived
                self.staging.clear()


class StoreSink:
    """A ``Sink`` over an open file of fsspec, which sends parts as they fill."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._written = 0

    def write(self, parts: Sequence[memoryview], offset: int) -> None:
        """Write the next bytes."""
        assert offset == self._written
        for part in parts:
            self._file.write(part)
            self._written += part.nbytes

    def finish(self) -> None:
        """Close the file, which makes it durable."""
        self._file.close()

    def close(self) -> None:
        """Close the file, whole or not."""
        self._file.close()


class StoreSource:
    """A ``Source`` that asks for ranges."""

    # A store takes long to answer, and answers many at once.
    step, threads = BLOCK_BYTES, 16

    def __init__(self, system: Any, path: str) -> None:
        self._system, self._path = system, path

    def read(self, parts: Sequence[memoryview], offset: int) -> None:
        """One request for all parts."""
        stop = offset + sum(part.nbytes for part in parts)
        data = memoryview(self._system.cat_file(self._path, start=offset, end=stop))
        if data.nbytes != stop - offset:
            raise EOFError(f"{self._path} ends before byte {stop}")
        for part in parts:
            part[:] = data[: part.nbytes]
            data = data[part.nbytes :]

    def close(self) -> None:
        """Nothing is open."""


def _is_mark(name: str) -> bool:
    return name.startswith(".") and name.endswith(_MARK)


def _marked(mark: str) -> str:
    return mark.removeprefix(".").removesuffix(_MARK)
