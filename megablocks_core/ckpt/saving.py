"""Write a checkpoint: staged, hashed, synced, renamed, and ``LATEST`` last."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import xxhash
from torch import Tensor

from megablocks_core.ckpt.commit import Draft
from megablocks_core.ckpt.entries import take_apart
from megablocks_core.ckpt.manifest import CheckpointError
from megablocks_core.ckpt.writing import FileToWrite, Item
from megablocks_core.groups import LOCAL, Collection, Group, Held, Whole, as_bytes, together


def save(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    group: Group = LOCAL,
    keep_last: int | None = None,
    keep_every: int | None = None,
) -> None:
    """Write ``state`` as the checkpoint ``path``; it is durable once this returns.

    The first rank of ``group`` writes; the others send it their slices, each element once, a
    bounded bucket at a time. An error on one rank raises on all; then nothing stands under
    ``path``, and earlier checkpoints and ``LATEST`` are as they were.

    Args:
        path: The checkpoint's folder: new, or empty. Its parent, made if missing, holds LATEST.
            A path, or a URL that fsspec knows.
        state: By name, a module, a torch optimizer of modules in ``state``, a tensor, or a
            JSON value. What is not cut must be equal on all ranks.
        group: All ranks that hold a part of ``state`` (usually the world).
        keep_last: Once this checkpoint is durable, delete older ones as ``prune`` does.
        keep_every: As for ``prune``.

    Raises:
        ValueError: ``path`` is not empty, or ``state`` holds what cannot be saved (of another
            kind, different between ranks, on ranks outside ``group``).
        CheckpointError: Another rank failed.
        OSError: The disk is full, or another fault of the file system.
    """
    task = f"save({str(path)!r})"
    with together(task, group=group, raises=CheckpointError):
        entries = take_apart(state)
        digests = {part.name: _digest(part) for part in entries.held if _is_whole(part, group)}
    _check_equal(entries.state, digests, group)
    collection = Collection(entries.held, group=group, task=task, raises=CheckpointError)
    draft = Draft(path, group=group, keep_last=keep_last, keep_every=keep_every)
    try:
        writer = draft.open(_files(collection.wholes) if group.rank == 0 else [])

        def add(name: str, tensor: Tensor) -> None:
            entry, _, key = name.partition("/")
            writer.add(f"{entry}.safetensors", key, tensor)

        collection.visit(add)
        with together(task, group=group, raises=CheckpointError):
            receipt = writer.finish()
        draft.commit(entries.state, receipt)
    finally:
        draft.discard()


def _files(wholes: list[Whole]) -> list[FileToWrite]:
    """One file for each entry."""
    files: dict[str, list[Item]] = {}
    for name, shape, dtype in wholes:
        entry, _, key = name.partition("/")
        item = Item(key, name, dtype, (0,) * len(shape), shape, shape)
        files.setdefault(f"{entry}.safetensors", []).append(item)
    return [FileToWrite(file, items) for file, items in files.items()]


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
