"""A checkpoint in the making: it appears whole, with ``LATEST`` after it, or not at all."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import xxhash

from megablocks_core.ckpt.manifest import (
    BLOCK_BYTES,
    MANIFEST,
    CheckpointError,
    FileRecord,
    Manifest,
    StoredAs,
)
from megablocks_core.ckpt.newest import newest_time, write_latest
from megablocks_core.ckpt.places import LocalPlace, place_of
from megablocks_core.ckpt.writing import FileToWrite, Receipt, Writer
from megablocks_core.files import NewFolder
from megablocks_core.groups import Group, together


class Draft:
    """The checkpoint ``path`` until it is committed; made and used alike on every rank.

    Args:
        path: The checkpoint's folder, which must be new or empty.
        group: All ranks that write.
    """

    def __init__(self, path: str | os.PathLike[str], *, group: Group) -> None:
        self._target = place_of(path)
        self._group = group
        self._task = f"save({str(self._target)!r})"
        self._folder: NewFolder | None = None
        self._staging: LocalPlace | None = None
        self._writer: Writer | None = None

    def open(self) -> None:
        """Make the staging folder, which every rank must see.

        Raises:
            ValueError: ``path`` is not empty.
            CheckpointError: Another rank failed, or a rank does not see the folder.
            OSError: The folder cannot be made.
        """
        with self._together():
            if self._group.rank == 0:
                self._folder = NewFolder(self._target.path)
        name = self._group.broadcast_object(self._folder and self._folder.staging.name)
        self._staging = LocalPlace(self._target.path.with_name(name))
        with self._together():
            if not self._staging.path.is_dir():
                raise CheckpointError(
                    f"{self._target} must lie on storage that all ranks share: {self._staging} "
                    "was made by the first rank"
                )

    def writer(self, files: Sequence[FileToWrite]) -> Writer:
        """This rank's writer of ``files``; sends nothing. ``discard`` closes it."""
        assert self._staging is not None and self._writer is None
        self._writer = Writer(self._staging, files)
        return self._writer

    def commit(
        self,
        state: dict[str, dict[str, Any]],
        receipt: Receipt,
        *,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Write the manifest, give the folder its name and point ``LATEST`` at it.

        Args:
            state: What the manifest says of each entry; the first rank's is taken.
            receipt: What this rank wrote.
            files: Small files beside the tensors' (``config.json``), from the first rank.

        Raises:
            CheckpointError: Another rank failed.
            OSError: A fault of the file system; nothing stands under ``path``, and ``LATEST``
                is as it was.
        """
        receipts = self._group.all_gather_object(receipt)
        with self._together():
            if self._group.rank == 0:
                self._publish(Manifest(0, state, *_joined(receipts)), files or {})

    def discard(self) -> None:
        """Close what is open and delete what was not committed; never raises, sends nothing."""
        if self._writer is not None:
            self._writer.close()
        if self._folder is not None:
            self._folder.discard()

    def _publish(self, manifest: Manifest, files: Mapping[str, bytes]) -> None:
        assert self._folder is not None and self._staging is not None
        for name, data in files.items():
            self._staging.put(name, data)
            manifest.files[name] = _record(data)
        root = self._target.path.parent
        manifest.saved_unix_ns = max(time.time_ns(), newest_time(root) + 1)
        self._staging.put(MANIFEST, manifest.text().encode())
        try:
            self._folder.publish()
            write_latest(root, self._target.path.name, manifest.digest)
        except BaseException:
            self._folder.withdraw()
            raise

    def _together(self) -> AbstractContextManager[None]:
        return together(self._task, group=self._group, raises=CheckpointError)


def _joined(receipts: Sequence[Receipt]) -> tuple[dict[str, StoredAs], dict[str, FileRecord]]:
    """What all ranks wrote, as one."""
    tensors: dict[str, StoredAs] = {}
    files: dict[str, FileRecord] = {}
    for receipt in receipts:
        for name, stored in receipt.tensors.items():
            known = tensors.setdefault(name, StoredAs(stored.dtype, stored.shape, []))
            assert (known.dtype, known.shape) == (stored.dtype, stored.shape), name
            known.chunks.extend(stored.chunks)
        assert not files.keys() & receipt.files.keys()
        files |= receipt.files
    for stored in tensors.values():
        stored.chunks.sort(key=lambda chunk: chunk.start)
    return tensors, files


def _record(data: bytes) -> FileRecord:
    view = memoryview(data)
    starts = range(0, len(data), BLOCK_BYTES)
    hashes = [xxhash.xxh3_128_hexdigest(view[start : start + BLOCK_BYTES]) for start in starts]
    return FileRecord(len(data), hashes)
