"""A Hugging Face folder, or a training checkpoint, as a folder of quantised weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from megablocks_core.auto.sources import described_source, is_hf_folder
from megablocks_core.export.arguments import folder_of
from megablocks_core.export.quantising.calibration import Calibration
from megablocks_core.export.quantising.recipe import Recipe
from megablocks_core.export.quantising.saving import (
    check_asked,
    nbytes_of_folder,
    write_quantised,
)
from megablocks_core.files import check_new


def quantize_to_hf(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    recipe: Recipe,
    calibration: Calibration | None = None,
    entry: str = "model",
    config: str | os.PathLike[str] | None = None,
    like: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5 * 2**30,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the weights of a folder, or of a checkpoint, quantised, in one process.

    The files have the bytes that ``save_quantized_hf`` writes of the same model. A few tensors, or
    slabs of one, are in memory at a time. The folder appears whole or not at all.

    Args:
        source: A Hugging Face folder, also a quantised one; or a training checkpoint.
        path: The folder: new, or empty.
        recipe: The format, and which weights stay as they are.
        calibration: What data has shown of activations; for ``Fp8`` and ``Nvfp4``.
        entry: Of a checkpoint, the name of the weights in it.
        config: Of a checkpoint, the path of the model's ``config.json``.
        like: A folder whose tokenizer files are copied; default a folder that is the source.
        dtype: Of all floating-point tensors, before some are quantised.
        max_file_bytes: A file is closed before it grows beyond this.
        progress: Called with the bytes looked at and written so far, and in all; until all have
            been looked at, with those of a plain folder.

    Raises:
        ValueError: What ``save_quantized_hf`` says. Nothing was written.
        CheckpointError: A checkpoint is damaged.
        OSError: The disk is full, or another fault of the file system.
    """
    check_asked(recipe, calibration, max_file_bytes)
    target = Path(os.path.realpath(folder_of(path)))
    check_new(target)
    found = described_source(
        source,
        entry=entry,
        config=config,
        like=like,
        dtype=dtype,
        nbytes=lambda one: nbytes_of_folder(recipe, one.wholes),
        progress=progress,
    )
    write_quantised(
        found,
        target,
        recipe=recipe,
        calibration=calibration,
        like=source if like is None and is_hf_folder(source) else like,
        max_file_bytes=max_file_bytes,
        task=f"quantize_to_hf({str(path)!r})",
    )
