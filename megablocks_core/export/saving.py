"""Write the weights of a model, from any layout, as a folder in Hugging Face's format."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from xxhash import xxh3_64_hexdigest

from megablocks_core.export.arguments import check_bytes, check_model, folder_of
from megablocks_core.export.drafting import FolderDraft, Written
from megablocks_core.export.dtypes import check_values, chosen
from megablocks_core.export.hf_files import beside, made_of, name_dtype, planned, split
from megablocks_core.export.ours import Ours
from megablocks_core.export.quantised import plain
from megablocks_core.export.verifying import layout_of
from megablocks_core.export.vocabulary import padded, part_shapes, with_vocabulary
from megablocks_core.export.writing import write_folder
from megablocks_core.files import check_new, read_json
from megablocks_core.groups import (
    LOCAL,
    Collection,
    Group,
    Held,
    interrupts_held,
    logical_tensors,
    together,
)


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
        with together(task, group=group):
            check_model(model)
            check_bytes(max_file_bytes, "max_file_bytes")
            target = Path(os.path.realpath(folder_of(path)))
            if group.rank == 0:
                check_new(target)
            config = _config(model, None if like is None else folder_of(like, "like"))
            if vocab_size is not None:
                config = with_vocabulary(config, vocab_size)
            held = [
                Held(name, tensor, specs)
                for name, tensor, specs in logical_tensors(
                    model, remove_duplicate=True, unstack=True
                )
            ]
            shapes = part_shapes(model)
            layout = layout_of(config).named(shapes)
            if vocab_size is not None:
                layout = padded(layout, config, shapes)
            dtypes = chosen(dtype, like)
        collection = Collection(
            held, group=group, task=task, raises=RuntimeError, order=layout.order
        )
        with together(task, group=group):
            wholes = planned(collection.wholes, layout, dtypes)
            name_dtype(config, wholes)
        _check_agreed((str(target), max_file_bytes, [*map(str, wholes)]), group)
        check_values(held, layout, dtypes, group=group, allow_nonfinite=allow_nonfinite)
        ours = Ours(collection.wholes)
        made = made_of(ours, layout)
        files = split([Written(whole, made[whole.name]) for whole in wholes], max_file_bytes)
        draft = FolderDraft(target, files, ours, rank=group.rank, num_ranks=group.size)
        write_folder(
            draft,
            collection,
            lambda: beside(files, config, None if like is None else Path(like)),
            group=group,
            task=task,
        )


def _check_agreed(plan: tuple[Any, ...], group: Group) -> None:
    """Raise where ranks would write different files: they were called with other arguments.

    Raises:
        ValueError: They would.
    """
    names = ("path", "max_file_bytes", "dtype")
    digests = [xxh3_64_hexdigest(repr(part).encode()) for part in plan]
    for rank, theirs in zip(group.ranks, group.all_gather_object(digests), strict=True):
        differing = [name for name, a, b in zip(names, digests, theirs, strict=True) if a != b]
        if differing:
            raise ValueError(f"ranks must agree on {differing}, but rank {rank} has another")


def _config(model: nn.Module, like: str | os.PathLike[str] | None) -> dict[str, Any]:
    if like is not None:
        return plain(read_json(Path(like) / "config.json", dict))
    spec: Any = getattr(model, "spec", None)
    if hasattr(spec, "to_hf"):
        return dict(spec.to_hf())
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_json_string"):
        return plain(json.loads(config.to_json_string()))
    raise ValueError(f"like={like} must be a folder, for the model has no spec or config to write")
