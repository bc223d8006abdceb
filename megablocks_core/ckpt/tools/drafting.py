"""Write a checkpoint whose tensors come one at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from megablocks_core.ckpt.format.file_names import rank_file, whole_file
from megablocks_core.ckpt.format.writing import FileToWrite, Item
from megablocks_core.ckpt.saving.commit import Draft
from megablocks_core.ckpt.tools.checkpoint import Held
from megablocks_core.files.progress import Progress
from megablocks_core.groups import LOCAL


def write_checkpoint(
    path: str | os.PathLike[str],
    state: dict[str, dict[str, Any]],
    tensors: Mapping[str, Held],
    read: Callable[[str], Tensor],
    *,
    files: Mapping[str, bytes],
    progress: Progress,
) -> None:
    """Write the checkpoint ``path``, as ``save`` does on one rank.

    At most two whole tensors are in memory at once.

    Args:
        path: A new or empty folder.
        state: What the manifest says of each entry.
        tensors: By "entry/name".
        read: A whole tensor, by name; asked for each once.
        files: Files beside the tensors.
        progress: Told of each tensor.

    Raises:
        ValueError: ``path`` is not empty.
        OSError: A fault of the file system; then nothing stands under ``path``.
    """
    plan = _files(state, tensors)
    draft = Draft(path, group=LOCAL)
    try:
        writer = draft.open(plan)
        for file in plan:
            for item in file.items:
                writer.add(file.file, item.key, read(item.name))
                progress.add(tensors[item.name].nbytes)
        draft.commit(state, writer.finish(), files=files)
    finally:
        draft.discard()
        progress.close()


def _files(state: Mapping[str, dict[str, Any]], tensors: Mapping[str, Held]) -> list[FileToWrite]:
    """A file for each entry that has tensors, widest dtype first."""
    items: dict[str, list[Item]] = {}
    for name, held in tensors.items():
        entry, _, key = name.partition("/")
        whole = (0,) * len(held.shape)
        items.setdefault(entry, []).append(
            Item(key, name, held.dtype, whole, held.shape, held.shape)
        )
    files = []
    for entry, found in items.items():
        found.sort(key=lambda item: -item.dtype.itemsize)
        as_it_lies = state[entry]["kind"] == "optimizer"
        file = rank_file(entry, 0) if as_it_lies else whole_file(entry)
        files.append(FileToWrite(file, found))
    return files
