"""Write the weights of a model, from any layout, as a folder in Hugging Face's format."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from megablocks_core.export.arguments import check_bytes
from megablocks_core.export.described import described, target_of
from megablocks_core.export.drafting import FolderDraft, Written
from megablocks_core.export.hf_files import beside, name_dtype, split
from megablocks_core.export.writing import write_folder
from megablocks_core.groups import LOCAL, Group, interrupts_held, together


def save_hf(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    group: Group = LOCAL,
    dtype: torch.dtype | Literal["like"] | None = None,
    like: str | os.PathLike[str] | None = None,
    max_file_bytes: int = 5 * 2**30,
    vocab_size: int | None = None,
    allow_nonfinite: bool = False,
) -> None:
    """Write ``model``, from any layout, as a folder that transformers opens.

    The ranks of ``group`` write the files in turn, in a folder that all must see, and send each
    other what goes into these, in slabs of bounded size: beyond its share no rank ever holds more
    than some of them, however large a tensor is. Which file holds what, and its bytes, depend on
    no layout. The folder appears whole or not at all.

    Args:
        model: A model of a family in ``families.FAMILIES``.
        path: The folder: new, or empty.
        group: All ranks that hold a part of the model.
        dtype: Of all floating-point tensors; "like": each has the one that it has in the folder
            ``like``. Default each tensor's own.
        like: A folder whose ``config.json`` is taken, and whose tokenizer files are copied.
            Without it the config is ``model.spec.to_hf()`` or that of a transformers model.
        max_file_bytes: A file is closed before it grows beyond this.
        vocab_size: How many rows of a padded vocabulary are written; the config says it. Default
            all, which then must be as many as the config says.
        allow_nonfinite: Whether NaN and infinite values are written like others.

    Raises:
        ValueError: ``path`` is not empty, the family is unknown, tensors are not those that
            the config describes, values are not finite, or they do not fit ``dtype``: some become
            infinite, or all of a tensor zero. Nothing was written.
        RuntimeError: Another rank failed.
        OSError: The disk is full, or another fault of the file system.
    """
    task = f"save_hf({str(path)!r})"
    with interrupts_held(group=group):
        target = target_of(model, path, group=group, task=task)
        with together(task, group=group):
            check_bytes(max_file_bytes, "max_file_bytes")
        found = described(
            model,
            group=group,
            task=task,
            agreed={"path": str(target), "max_file_bytes": max_file_bytes},
            dtype=dtype,
            like=like,
            vocab_size=vocab_size,
            allow_nonfinite=allow_nonfinite,
        )
        name_dtype(found.config, found.wholes)
        written = [Written(whole, found.made[whole.name]) for whole in found.wholes]
        files = split(written, max_file_bytes)
        draft = FolderDraft(target, files, found.ours, rank=group.rank, num_ranks=group.size)
        write_folder(
            draft,
            found.collection,
            lambda: beside(files, found.config, None if like is None else Path(like)),
            group=group,
            task=task,
        )
