"""Read all of a checkpoint, and compare it with what was written and with itself."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from megablocks_core.ckpt.format.stored import Stored, Target
from megablocks_core.ckpt.manifest import BLOCK_BYTES, CheckpointError
from megablocks_core.ckpt.places.places import place_of
from megablocks_core.files.safetensors import read_header

_THREADS = 3


def verify(
    path: str | os.PathLike[str], *, progress: Callable[[int, int], None] | None = None
) -> None:
    """Read all of the checkpoint ``path`` and compare it with what was written.

    Every block is checked against its hash, and every safetensors file's own header against the
    manifest, so that other readers find the same tensors at the same places.

    Args:
        path: The checkpoint's folder.
        progress: Called after each block with the bytes read so far and those of all files.

    Raises:
        CheckpointError: What is wrong: files that are missing or cut short, the damaged blocks
            and the tensors that lie in them, or headers that say something else.
    """
    stored = Stored(place_of(path))
    reader = _Reader(stored, progress)
    faults = []
    for file in stored.manifest.files:
        damage = _damage(stored, file, reader.damaged(file))
        if not damage and file.endswith(".safetensors"):
            damage = _untruths(stored, file)
        faults += damage
    if faults:
        raise CheckpointError("; ".join(faults))


class _Reader:
    """Reads every block of files, a few threads at once, and says how far it is."""

    def __init__(self, stored: Stored, progress: Callable[[int, int], None] | None) -> None:
        self._stored, self._progress = stored, progress
        self._total = sum(record.size for record in stored.manifest.files.values())
        self._done = 0

    def damaged(self, file: str) -> list[int]:
        """Every block of a file that is not what was written."""
        size, found = self._stored.manifest.files[file].size, []
        starts = range(0, size, BLOCK_BYTES)
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="ckpt-verify") as pool:
            for start, good in zip(
                starts, pool.map(lambda start: self._is_good(file, start), starts), strict=True
            ):
                if not good:
                    found.append(start // BLOCK_BYTES)
                self._done += min(BLOCK_BYTES, size - start)
                if self._progress is not None:
                    self._progress(self._done, self._total)
        return found

    def _is_good(self, file: str, start: int) -> bool:
        size = self._stored.manifest.files[file].size
        memory = torch.empty(min(BLOCK_BYTES, size - start), dtype=torch.uint8).numpy().data
        try:
            self._stored.fill(file, [Target(start, memory)])
        except CheckpointError:
            return False
        return True


def _damage(stored: Stored, file: str, blocks: Sequence[int]) -> list[str]:
    faults = []
    for block in blocks:
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
