"""Read all of a checkpoint, and compare it with what was written and with itself."""

from __future__ import annotations

import os
from collections import Counter

from megablocks_core.ckpt.manifest import BLOCK_BYTES, CheckpointError
from megablocks_core.ckpt.places import place_of
from megablocks_core.ckpt.stored import Stored
from megablocks_core.files.safetensors import read_header


def verify(path: str | os.PathLike[str]) -> None:
    """Read all of the checkpoint ``path`` and compare it with what was written.

    Every block is checked against its hash, and every safetensors file's own header against the
    manifest, so that other readers find the same tensors at the same places.

    Raises:
        CheckpointError: What is wrong: files that are missing or cut short, the damaged blocks
            and the tensors that lie in them, or headers that say something else.
    """
    stored = Stored(place_of(path))
    faults = []
    for file in stored.manifest.files:
        damage = _damage(stored, file)
        if not damage and file.endswith(".safetensors"):
            damage = _untruths(stored, file)
        faults += damage
    if faults:
        raise CheckpointError("; ".join(faults))


def _damage(stored: Stored, file: str) -> list[str]:
    faults = []
    for block in stored.damaged_blocks(file):
        start = block * BLOCK_BYTES
        stop = min(start + BLOCK_BYTES, stored.manifest.files[file].size)
        held = [
            name
            for name, tensor in stored.manifest.tensors.items()
            for chunk in tensor.chunks
            if chunk.file == file and chunk.offset < stop and start < tensor.end_of(chunk)
        ]
        faults.append(f"{stored.path(file)} is damaged in bytes {start} to {stop}, in {held}")
    return faults


def _untruths(stored: Stored, file: str) -> list[str]:
    """Where a file's header and the manifest disagree."""
    size = stored.manifest.files[file].size
    try:
        header = read_header(lambda start, stop: stored.bytes_of(file, start, stop), size)
    except ValueError as error:
        return [f"{stored.path(file)}: {error}"]
    says = Counter((one.dtype, one.shape, one.offset) for one in header.values())
    known = Counter(
        (tensor.dtype, chunk.shape, chunk.offset)
        for tensor in stored.manifest.tensors.values()
        for chunk in tensor.chunks
        if chunk.file == file
    )
    if says == known:
        return []
    return [
        f"{stored.path(file)} has a header that differs from the manifest: only in the header "
        f"{sorted(says - known)[:3]}, only in the manifest {sorted(known - says)[:3]}"
    ]
