"""A checkpoint in the making: it appears whole, with ``LATEST`` after it, or not at all."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import xxhash

from megablocks_core.ckpt.format.stored import check_sizes
from megablocks_core.ckpt.format.writing import FileToWrite, Receipt, Writer
from megablocks_core.ckpt.loading.newest import newest_time, write_latest
from megablocks_core.ckpt.manifest import (
    BLOCK_BYTES,
    MANIFEST,
    CheckpointError,
    FileRecord,
    Manifest,
    StoredAs,
    next_time,
)
from megablocks_core.ckpt.places.places import FolderDraft, above, place_of
from megablocks_core.ckpt.places.space import check_space
from megablocks_core.ckpt.saving.retention import check_keep, outdated
from megablocks_core.ckpt.transfer.gathering import at_first_rank
from megablocks_core.groups import Group, together


class Draft:
    """The checkpoint ``path`` until it is committed; made and used alike on every rank.

    Args:
        path: The checkpoint's folder, which must be new or empty.
        group: All ranks that write.
        keep_last: As for ``prune``, to be done once the new checkpoint is durable.
        keep_every: As for ``prune``.

    Raises:
        ValueError: ``keep_last`` or ``keep_every`` is less than 1.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        group: Group,
        keep_last: int | None = None,
        keep_every: int | None = None,
    ) -> None:
        check_keep(keep_last, keep_every)
        self._keep = keep_last, keep_every
        self._root, self._name = above(path)
        self._group = group
        self._task = f"save({str(path)!r})"
        self._folder: FolderDraft | None = None
        self._writer: Writer | None = None

    def open(self, files: Sequence[FileToWrite]) -> Writer:
        """Make the staging folder, and in it this rank's files, once there is room for all.

        Sends a few small messages. ``discard`` closes the writer.

        Raises:
            ValueError: ``path`` is not empty, or not the same on all ranks.
            CheckpointError: Another rank failed, or a rank does not see the folder.
            OSError: There is no room, or the folder or a file cannot be made.
        """
        target = f"{self._root}/{self._name}"
        mine = (target, sum(file.layout().size for file in files))
        targets, sizes = zip(*self._group.all_gather_object(mine), strict=True)
        with self._together():
            if set(targets) != {target}:
                raise ValueError(f"path must be the same on all ranks, not {sorted(set(targets))}")
            if self._group.rank == 0:
                check_space(self._root, sum(sizes))
                self._folder = self._root.draft(self._name)
        staging = place_of(self._group.broadcast_object(self._folder and str(self._folder.staging)))
        with self._together():
            if not staging.is_there():
                raise CheckpointError(
                    f"{self._root} must lie on storage that all ranks share: {staging} was made "
                    "by the first rank"
                )
            self._writer = Writer(staging, files)
        return self._writer

    def commit(
        self,
        state: dict[str, dict[str, Any]],
        receipt: Receipt,
        *,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Write the manifest, give the folder its name, point ``LATEST`` at it, then prune.

        A checkpoint that cannot be deleted is warned of; the new one stands.

        Args:
            state: What the manifest says of each entry; the first rank's is taken.
            receipt: What this rank wrote.
            files: Small files beside the tensors' (``config.json``), from the first rank.

        Raises:
            CheckpointError: Another rank failed, or what it wrote is not there.
            OSError: A fault of the file system; nothing stands under ``path``, and ``LATEST``
                is as it was.
        """
        receipts = at_first_rank(receipt, group=self._group)
        # What the first rank has committed cannot be taken back by Ctrl-C on another.
        with self._together(interruptible=False):
            if self._group.rank == 0:
                self._commit(Manifest(0, state, *_joined(receipts)), files or {})
                self._prune()

    def discard(self) -> None:
        """Close what is open and delete what was not committed; never raises, sends nothing."""
        if self._writer is not None:
            self._writer.close()
        if self._folder is not None:
            self._folder.discard()

    def _commit(self, manifest: Manifest, files: Mapping[str, bytes]) -> None:
        assert self._folder is not None
        for name, data in files.items():
            self._folder.staging.put(name, data)
            manifest.files[name] = _record(data)
        check_sizes(self._folder.staging, manifest)
        manifest.saved_unix_ns = next_time(time.time_ns(), newest_time(self._root))
        try:
            self._folder.commit(MANIFEST, manifest.text().encode())
            write_latest(self._root, self._name, manifest.digest)
        except BaseException:
            self._folder.withdraw()
            raise

    def _prune(self) -> None:
        try:
            for name in outdated(self._root, *self._keep):
                self._root.remove(name)
        except (CheckpointError, OSError) as error:
            warnings.warn(f"{self._task}: saved, but pruning failed: {error}", stacklevel=5)

    def _together(self, *, interruptible: bool = True) -> AbstractContextManager[None]:
        return together(
            self._task, group=self._group, raises=CheckpointError, interruptible=interruptible
        )


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
