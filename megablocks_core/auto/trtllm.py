"""A Hugging Face folder, or a training checkpoint, as a checkpoint of TensorRT-LLM."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from megablocks_core.auto.sources import described_source
from megablocks_core.export.arguments import folder_of
from megablocks_core.export.quantising.calibration import Calibration
from megablocks_core.export.quantising.recipe import Recipe
from megablocks_core.export.trtllm.mapping import Mapping
from megablocks_core.export.trtllm.saving import (
    check_asked,
    nbytes_of_checkpoint,
    write_trtllm,
)
from megablocks_core.files import check_new


def to_trtllm(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    tp: int = 1,
    pp: int = 1,
    moe_tp: int | None = None,
    moe_ep: int = 1,
    recipe: Recipe | None = None,
    calibration: Calibration | None = None,
    entry: str = "model",
    config: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the weights of a folder, or of a checkpoint, for TensorRT-LLM, in one process.

    The files have the bytes that ``save_trtllm`` writes of the same model. A few tensors, or slabs
    of one, are in memory at a time. The folder appears whole or not at all.

    Args:
        source: A Hugging Face folder, also a quantised one; or a training checkpoint.
        path: The folder: new, or empty.
        tp: As ``save_trtllm`` has it, and so have the next.
        pp: How many stages of layers there are.
        moe_tp: Into how many slices an expert is cut.
        moe_ep: To how many ranks the experts are dealt.
        recipe: ``Fp8()``, ``Int8()``, or none.
        calibration: What data has shown of activations; for ``Fp8``.
        entry: Of a checkpoint, the name of the weights in it.
        config: Of a checkpoint, the path of the model's ``config.json``.
        dtype: float16, bfloat16 or float32; default that of the weights.
        progress: Called with the bytes looked at and written so far, and in all; until all have
            been looked at, with those of a plain folder.

    Raises:
        ValueError: What ``save_trtllm`` says. Nothing was written.
        CheckpointError: A checkpoint is damaged.
        OSError: The disk is full, or another fault of the file system.
    """
    ranks = Mapping(tp, pp, moe_tp, moe_ep)
    check_asked(calibration, dtype)
    target = Path(os.path.realpath(folder_of(path)))
    check_new(target)
    found = described_source(
        source,
        entry=entry,
        config=config,
        dtype=dtype,
        nbytes=lambda one: nbytes_of_checkpoint(one, ranks=ranks, recipe=recipe, dtype=dtype),
        progress=progress,
    )
    write_trtllm(
        found,
        target,
        ranks=ranks,
        recipe=recipe,
        calibration=calibration,
        dtype=dtype,
        task=f"to_trtllm({str(path)!r})",
    )
