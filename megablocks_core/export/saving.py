"""Write the weights of a model, from any layout, as a folder in Hugging Face's format."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megablocks_core.export.drafting import HfDraft, name_dtype, planned
from megablocks_core.export.loading import parts_of
from megablocks_core.export.quantised import plain
from megablocks_core.export.verifying import layout_of
from megablocks_core.files import read_json
from megablocks_core.groups import LOCAL, Collection, Group, Held, logical_tensors, together


def save_hf(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    group: Group = LOCAL,
    dtype: torch.dtype | None = None,
    like: str | os.PathLike[str] | None = None,
    max_file_bytes: int = 5 * 2**30,
) -> None:
    """Write ``model``, from any layout, as a folder that transformers opens.

    The first rank of ``group`` writes; the others send it their slices, a bounded bucket at
    a time. The folder appears whole or not at all.

    Args:
        model: A model of a family in ``families.FAMILIES``.
        path: The folder: new, or empty.
        group: All ranks that hold a part of the model.
        dtype: Of all floating-point tensors; default each tensor's own.
        like: A folder whose ``config.json`` is taken, and whose tokenizer files are copied.
            Without it the config is ``model.spec.to_hf()`` or that of a transformers model.
        max_file_bytes: A file is closed before it grows beyond this.

    Raises:
        ValueError: ``path`` is not empty, the family is unknown, tensors are not those that
            the config describes, or a value does not fit ``dtype``.
        RuntimeError: Another rank failed.
        OSError: The disk is full, or another fault of the file system.
    """
    target = Path(path).absolute()
    task = f"save_hf({str(target)!r})"
    with together(task, group=group):
        config = _config(model, like)
        held = [
            Held(name, tensor, specs)
            for name, tensor, specs in logical_tensors(model, remove_duplicate=True, unstack=True)
        ]
        names = [
            part
            for name, tensor, specs in logical_tensors(model, remove_duplicate=True)
            for part in parts_of(name, tensor, specs)
        ]
        layout = layout_of(config).named(names)
    collection = Collection(held, group=group, task=task, raises=RuntimeError, order=layout.order)
    wholes = planned(collection.wholes, layout, dtype)
    name_dtype(config, wholes)
    draft = HfDraft(target, wholes, layout, max_file_bytes)
    try:
        with together(task, group=group):
            if group.rank == 0:
                draft.open()
        collection.visit(draft.add)
        with together(task, group=group):
            if group.rank == 0:
                draft.publish(config, None if like is None else Path(like))
    finally:
        draft.close()


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
