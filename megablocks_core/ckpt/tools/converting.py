"""Convert checkpoints: torch's DCP to ours and back, and Megatron's weights to ours."""

from __future__ import annotations

import os

from megablocks_core.ckpt.tools.checkpoint import read_whole
from megablocks_core.ckpt.tools.dcp_writing import write_dcp
from megablocks_core.ckpt.tools.drafting import write_checkpoint
from megablocks_core.ckpt.tools.megatron import MegatronCheckpoint
from megablocks_core.ckpt.tools.opening import open_checkpoint
from megablocks_core.ckpt.tools.own import OwnCheckpoint
from megablocks_core.files.progress import Progress


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    config: str | os.PathLike[str] | None = None,
) -> list[str]:
    """Write the checkpoint ``target``: a DCP one from ours, ours from a DCP or Megatron one.

    Args:
        source: A checkpoint of this library, of torch's DCP, or of Megatron's ``torch_dist``.
        target: A new or empty folder.
        config: The model's ``config.json``, as Hugging Face has it, needed for Megatron's.

    Returns:
        What was left out, in words: of Megatron's all that is no weight.

    Raises:
        ValueError: ``source`` holds what has no place in the other form, or ``target`` is not
            empty.
        CheckpointError: ``source`` is damaged.
    """
    checkpoint = open_checkpoint(source, config=config)
    total = sum(held.nbytes for held in checkpoint.tensors.values())
    progress = Progress("convert", total)
    if isinstance(checkpoint, OwnCheckpoint):
        write_dcp(target, checkpoint, progress=progress)
        return []
    write_checkpoint(
        target,
        checkpoint.state,
        checkpoint.tensors,
        lambda name: read_whole(checkpoint, name),
        files=checkpoint.beside(),
        progress=progress,
    )
    if isinstance(checkpoint, MegatronCheckpoint) and checkpoint.left_out:
        return [f"left out {checkpoint.left_out} keys that hold no weights"]
    return []
