"""Which kind of checkpoint lies in a folder."""

from __future__ import annotations

import os

from megablocks_core.ckpt.manifest import MANIFEST, CheckpointError
from megablocks_core.ckpt.places import place_of
from megablocks_core.ckpt.tools.checkpoint import Checkpoint
from megablocks_core.ckpt.tools.dcp_names import DcpCheckpoint
from megablocks_core.ckpt.tools.dcp_reading import METADATA, DcpFolder
from megablocks_core.ckpt.tools.own import OwnCheckpoint


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint in a folder: of this library, or torch's DCP.

    Raises:
        CheckpointError: It is neither, or damaged.
        ValueError: It is a DCP that holds what this library has no form for.
    """
    place = place_of(path)
    if place.size(MANIFEST) is not None:
        return OwnCheckpoint(place)
    if place.size(METADATA) is not None:
        return DcpCheckpoint(DcpFolder(place))
    raise CheckpointError(f"{place} is no checkpoint: it has neither {MANIFEST} nor {METADATA}")
