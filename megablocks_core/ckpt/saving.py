"""Write a checkpoint: staged, hashed, synced, renamed, and ``LATEST`` last."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash
from torch import Tensor

from megablocks_core.ckpt.entries import take_apart
from megablocks_core.ckpt.manifest import (
    MANIFEST,
    BlockHashes,
    CheckpointError,
    Chunk,
    Manifest,
    StoredAs,
)
from megablocks_core.ckpt.newest import newest_time, write_latest
from megablocks_core.files import NewFolder, create_file
from megablocks_core.files.safetensors import DTYPE_CODES, SafetensorsWriter
from megablocks_core.groups import LOCAL, Collection, Group, Held, Whole, as_bytes, together


def save(path: str | os.PathLike[str], state: Mapping[str, Any], *, group: Group = LOCAL) -> None:
    """Write ``state`` as the checkpoint ``path``; it is durable once this returns.

    The first rank of ``group`` writes; the others send it their slices, each element once, a
    bounded bucket at a time. An error on one rank raises on all; then nothing stands under
    ``path``, and earlier checkpoints and ``LATEST`` are as they were.

    Args:
        path: The checkpoint's folder: new, or empty. Its parent, made if missing, holds LATEST.
        state: By name, a module, a torch optimizer of modules in ``state``, a tensor, or a
            JSON value. What is not cut must be equal on all ranks.
        group: All ranks that hold a part of ``state`` (usually the world).

    Raises:
        ValueError: ``path`` is not empty, or ``state`` holds what cannot be saved (of another
            kind, different between ranks, on ranks outside ``group``).
        CheckpointError: Another rank failed.
        OSError: The disk is full, or another fault of the file system.
    """
    target = Path(path).absolute()
    task = f"save({str(target)!r})"
    with together(task, group=group, raises=CheckpointError):
        entries = take_apart(state)
        digests = {part.name: _digest(part) for part in entries.held if _is_whole(part, group)}
    _check_equal(entries.state, digests, group)
    collection = Collection(entries.held, group=group, task=task, raises=CheckpointError)
    draft = _Draft(target, entries.state)
    try:
        with together(task, group=group, raises=CheckpointError):
            if group.rank == 0:
                draft.open(collection.wholes)
        collection.visit(draft.add)
        with together(task, group=group, raises=CheckpointError):
            if group.rank == 0:
                draft.commit()
    finally:
        draft.close()


class _Draft:
    """The checkpoint in the making, on the rank that writes."""

    def __init__(self, target: Path, state: dict[str, dict[str, Any]]) -> None:
        self._target = target
        self._manifest = Manifest(0, state)
        self._folder: NewFolder | None = None
        self._writers: dict[str, tuple[SafetensorsWriter, BlockHashes]] = {}

    def open(self, wholes: list[Whole]) -> None:
        self._folder = NewFolder(self._target)
        files: dict[str, list[Whole]] = {}
        for whole in wholes:
            entry, _, name = whole.name.partition("/")
            files.setdefault(f"{entry}.safetensors", []).append(whole._replace(name=name))
        for file, members in files.items():
            hashes = BlockHashes()
            self._writers[file] = (
                SafetensorsWriter(
                    self._folder.staging / file,
                    members,
                    metadata={"format": "pt"},
                    observe=hashes.update,
                ),
                hashes,
            )

    def add(self, name: str, tensor: Tensor) -> None:
        entry, _, key = name.partition("/")
        file = f"{entry}.safetensors"
        writer, _ = self._writers[file]
        writer.add(key, tensor)
        chunk = Chunk(file, writer.offsets[key], tensor.nbytes)
        code = DTYPE_CODES[tensor.dtype]
        self._manifest.tensors[name] = StoredAs(code, list(tensor.shape), [chunk])

    def commit(self) -> None:
        assert self._folder is not None
        for file, (writer, hashes) in self._writers.items():
            writer.finish()
            self._manifest.files[file] = hashes.record()
        root = self._target.parent
        self._manifest.saved_unix_ns = max(time.time_ns(), newest_time(root) + 1)
        create_file(self._folder.staging / MANIFEST, self._manifest.text().encode())
        try:
            self._folder.publish()
            write_latest(root, self._target.name, self._manifest.digest)
        except BaseException:
            self._folder.withdraw()
            raise

    def close(self) -> None:
        """Close the files; what was not published is deleted."""
        for writer, _ in self._writers.values():
            writer.close()
        if self._folder is not None:
            self._folder.discard()


def _is_whole(part: Held, group: Group) -> bool:
    return group.size > 1 and all(spec.group.size == 1 for spec in part.specs)


def _digest(part: Held) -> str:
    return xxhash.xxh3_128_hexdigest(as_bytes(part.tensor.detach().cpu()).numpy().data)


def _check_equal(state: dict[str, dict[str, Any]], digests: dict[str, str], group: Group) -> None:
    """Refuse what every rank should hold alike and does not: only one copy is written."""
    texts = {name: json.dumps(entry, sort_keys=True) for name, entry in state.items()}
    views = group.all_gather_object((texts, digests))
    for rank, (their_texts, their_digests) in zip(group.ranks, views, strict=True):
        for first, theirs, rule in (
            (views[0][0], their_texts, "JSON values must be equal"),
            (views[0][1], their_digests, "a tensor without shard marks must be equal"),
        ):
            names = [name for name in first if name in theirs and first[name] != theirs[name]]
            if names:
                raise ValueError(
                    f"state differs between ranks {group.ranks[0]} and {rank} at {names}: "
                    f"{rule} on all ranks"
                )
        if list(their_texts) != list(views[0][0]):
            raise ValueError(
                f"state must have the same names on all ranks: rank {group.ranks[0]} has "
                f"{list(views[0][0])}, rank {rank} has {list(their_texts)}"
            )
