"""Which kind of checkpoint lies in a folder."""

from __future__ import annotations

import os

from megablocks_core.ckpt.manifest import MANIFEST, CheckpointError
from megablocks_core.ckpt.places.places import place_of
from megablocks_core.ckpt.tools.checkpoint import Checkpoint
from megablocks_core.ckpt.tools.dcp_names import DcpCheckpoint
from megablocks_core.ckpt.tools.dcp_reading import METADATA, DcpFolder
from megablocks_core.ckpt.tools.megatron import MegatronCheckpoint, is_megatron
from megablocks_core.ckpt.tools.own import OwnCheckpoint


def open_folder(path: str | os.PathLike[str]) -> OwnCheckpoint | DcpFolder:
    """The checkpoint in a folder: of this library, or torch's DCP as it lies.

    Raises:
        CheckpointError: It is neither, or damaged.
    """
    place = place_of(path)
    if place.size(MANIFEST) is not None:
        return OwnCheckpoint(place)
    if place.size(METADATA) is not None:
        return DcpFolder(place)
    raise CheckpointError(f"{place} is no checkpoint: it has neither {MANIFEST} nor {METADATA}")


def open_checkpoint(
    path: str | os.PathLike[str], *, config: str | os.PathLike[str] | None = None
) -> Checkpoint:
    """The checkpoint in a folder, under this library's names.

    Args:
        path: The folder.
        config: Path of the model's ``config.json``, needed for Megatron's weights only.

    Raises:
        CheckpointError: It is no checkpoint, or damaged.
        ValueError: It holds what this library has no form for, or Megatron's weights without a
            ``config``.
    """
    found = open_folder(path)
    if isinstance(found, OwnCheckpoint):
        return found
    if not is_megatron(found):
        return DcpCheckpoint(found)
    if config is None:
        raise ValueError(f"{path} holds Megatron's weights: config must be the model's config.json")
    return MegatronCheckpoint(found, config)
