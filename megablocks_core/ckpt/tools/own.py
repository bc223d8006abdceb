"""A checkpoint of this library as the tools see it."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from megablocks_core.ckpt.format.stored import Stored, Target
from megablocks_core.ckpt.manifest import DTYPES, Chunk, StoredAs
from megablocks_core.ckpt.places.places import Place
from megablocks_core.ckpt.plans.boxes import inside, intersection, lengths
from megablocks_core.ckpt.tools.checkpoint import Held
from megablocks_core.ckpt.tools.runs import runs
from megablocks_core.groups import as_bytes
from megablocks_core.groups.cuts import Box

# Files beside the tensors are read whole; a longer one is none of config.json's kind.
LONGEST_FILE = 64 * 2**20


class OwnCheckpoint:
    """A checkpoint of this library; every byte is verified before it is used.

    Raises:
        CheckpointError: It is not whole.
    """

    def __init__(self, place: Place) -> None:
        self.stored = Stored(place)
        self.manifest = self.stored.manifest
        self.state = self.manifest.state
        self.tensors = {
            name: Held(DTYPES[one.dtype], one.shape) for name, one in self.manifest.tensors.items()
        }

    def read(self, name: str, box: Box) -> Tensor:
        """A box of a tensor; as for ``Checkpoint``."""
        known = self.manifest.tensors[name]
        out = torch.empty(lengths(box), dtype=DTYPES[known.dtype])
        for chunk in known.chunks:
            both = intersection(box, chunk.box)
            if both is None:
                continue
            if both == box and out.numel() == prod(lengths(both)):
                self._read(known, chunk, both, out)
                continue
            part = torch.empty(lengths(both), dtype=out.dtype)
            self._read(known, chunk, both, part)
            out[inside(both, box)] = part
        return out

    def beside(self) -> dict[str, bytes]:
        """Files in which no tensor lies, but for indexes of those in which some do."""
        held = {chunk.file for one in self.manifest.tensors.values() for chunk in one.chunks}
        found = {}
        for file, record in self.manifest.files.items():
            if file not in held and ".safetensors" not in file and record.size <= LONGEST_FILE:
                found[file] = bytes(self.stored.bytes_of(file, 0, record.size))
        return found

    def _read(self, known: StoredAs, chunk: Chunk, box: Box, out: Tensor) -> None:
        """Fill ``out`` from a box of a chunk, run by run."""
        if not out.numel():
            return
        size = DTYPES[known.dtype].itemsize
        targets = []
        for run in runs(inside(box, chunk.box), chunk.shape):
            start = chunk.offset + run.start * size
            targets.append((start, run.length * size, run.place * size))
        memory = as_bytes(out).numpy().data
        self.stored.fill(
            chunk.file,
            [Target(start, memory[place : place + length]) for start, length, place in targets],
        )
