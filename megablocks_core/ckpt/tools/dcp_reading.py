"""A folder that ``torch.distributed.checkpoint`` wrote, read without running what it names."""

from __future__ import annotations

import io
import zlib
from collections.abc import Collection
from contextlib import closing
from math import prod
from typing import Any

import torch
from torch import Tensor

from megablocks_core.ckpt.manifest import CheckpointError
from megablocks_core.ckpt.places.places import Place, Source
from megablocks_core.ckpt.plans.boxes import inside, intersection, lengths
from megablocks_core.ckpt.tools.checkpoint import SLAB_BYTES
from megablocks_core.ckpt.tools.dcp_metadata import Stretch, parse_metadata
from megablocks_core.ckpt.tools.runs import runs
from megablocks_core.ckpt.tools.torch_zip import SavedTensor, check_object, find_tensor
from megablocks_core.groups import as_bytes
from megablocks_core.groups.cuts import Box

METADATA = ".metadata"
# An object that is no tensor: a number, a list of names.
LONGEST_OBJECT = 64 * 2**20
# Of 100,000 tensors on 1,000 ranks it is some hundred megabytes.
LONGEST_METADATA = 2**32
_DEEPEST = 200


class DcpFolder:
    """A DCP checkpoint. Bytes are read at need, no more than a part of a tensor at once.

    Attributes:
        index: What it says of itself.

    Raises:
        CheckpointError: Its metadata is not there, names what may run code, or says what cannot
            be.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        size = place.size(METADATA)
        if size is not None and size > LONGEST_METADATA:
            raise CheckpointError(f"{place.child(METADATA)} has {size} bytes, too many to be read")
        data = place.read(METADATA)
        if data is None:
            raise CheckpointError(f"{place} has no {METADATA}: it is not a finished DCP checkpoint")
        self.index = parse_metadata(data, str(place.child(METADATA)))
        self._found: dict[Stretch, SavedTensor] = {}

    def __str__(self) -> str:
        return str(self._place)

    def files(self) -> dict[str, int]:
        """Bytes in each file.

        Raises:
            CheckpointError: One is missing.
        """
        places = [*self.index.objects.values()]
        places += [place for chunks in self.index.chunks.values() for _, place in chunks]
        found: dict[str, int] = {}
        for file in sorted({place.file for place in places}):
            size = self._place.size(file)
            if size is None:
                raise CheckpointError(f"{self._place.child(file)} is missing")
            found[file] = size
        return found

    def read_file(self, name: str) -> bytes | None:
        """A whole small file, or ``None`` if there is none."""
        return self._place.read(name)

    def read(self, key: str, box: Box) -> Tensor:
        """A box of a tensor, in memory of its own.

        A chunk that is read as a whole is checked against its CRC-32.

        Raises:
            CheckpointError: A file is damaged, or is not what the metadata says.
        """
        held = self.index.tensors[key]
        out = torch.empty(lengths(box), dtype=held.dtype)
        for chunk, place in self.index.chunks[key]:
            both = intersection(box, chunk)
            if both is None:
                continue
            with closing(self._open(place.file)) as source:
                saved = self._find(source, key, place)
                if (saved.dtype, saved.shape) != (held.dtype, lengths(chunk)):
                    raise CheckpointError(
                        f"{self._name(key, place)} holds {saved.dtype} {saved.shape}, not "
                        f"{held.dtype} {lengths(chunk)}"
                    )
                part = self._part(source, saved, inside(both, chunk), self._name(key, place))
            if both == box:
                return part
            out[inside(both, box)] = part
        return out

    def object(self, key: str) -> Any:
        """An object that is no tensor, if it is made of plain values.

        Raises:
            CheckpointError: It is of another class, or damaged.
        """
        place = self.index.objects[key]
        what = self._name(key, place)
        if place.length > LONGEST_OBJECT:
            raise CheckpointError(f"{what} has {place.length} bytes, more than {LONGEST_OBJECT}")
        memory = bytearray(place.length)
        with closing(self._open(place.file)) as source:
            self._fill(source, memoryview(memory), place.offset, what)
        check_object(memory, what)
        try:
            value = torch.load(io.BytesIO(memory), weights_only=True, map_location="cpu")
        except Exception as error:  # a damaged pickle raises anything
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise CheckpointError(f"{what} is not read: {reason[:200]}") from error
        _check_tree(value, place.length, what)
        return value

    def _name(self, key: str, place: Stretch) -> str:
        return f"{key!r} in {self._place.child(place.file)}"

    def _open(self, file: str) -> Source:
        try:
            return self._place.open(file)
        except FileNotFoundError as error:
            raise CheckpointError(f"{self._place.child(file)} is missing") from error

    def _find(self, source: Source, key: str, place: Stretch) -> SavedTensor:
        if place not in self._found:
            what = self._name(key, place)
            self._found[place] = find_tensor(source, place.offset, place.length, what)
        return self._found[place]

    def _fill(self, source: Source, memory: memoryview, offset: int, what: str) -> None:
        try:
            source.read([memory], offset)
        except EOFError as error:
            raise CheckpointError(f"{what}: the file ends too early") from error

    def _part(self, source: Source, saved: SavedTensor, box: Box, what: str) -> Tensor:
        """A box of a saved tensor."""
        if not saved.is_plain:  # of other strides: the storage as it is, and a view of it
            storage = torch.empty(saved.nbytes, dtype=torch.uint8)
            self._checked(source, saved, storage.numpy().data, what)
            whole = storage.view(saved.dtype)
            return whole.as_strided(saved.shape, saved.strides, saved.first)[box].clone()
        out = torch.empty(lengths(box), dtype=saved.dtype)
        memory = as_bytes(out).numpy().data
        if out.numel() == prod(saved.shape):
            self._checked(source, saved, memory, what)
            return out
        size = saved.dtype.itemsize
        for run in runs(box, saved.shape):
            part = memory[run.place * size : (run.place + run.length) * size]
            self._fill(source, part, saved.offset + run.start * size, what)
        return out

    def _checked(self, source: Source, saved: SavedTensor, memory: memoryview, what: str) -> None:
        """Fill memory with a whole storage, and compare its CRC-32."""
        crc = 0
        for start in range(0, saved.nbytes, SLAB_BYTES):
            part = memory[start : start + SLAB_BYTES]
            self._fill(source, part, saved.offset + start, what)
            crc = zlib.crc32(part, crc)
        if saved.crc is not None and crc != saved.crc:
            raise CheckpointError(f"{what} is damaged: its CRC-32 is not the one written")


def _check_tree(value: Any, most: int, what: str) -> None:
    """Check that nested dicts, lists and tuples hold at most so many values, and end somewhere.

    A few bytes that name one list twice, which names another twice, and so on, hold billions.
    """
    count, waiting = 0, [(value, 0)]
    while waiting:
        one, depth = waiting.pop()
        inner = one.values() if isinstance(one, dict) else one
        if isinstance(inner, str) or not isinstance(inner, Collection):
            continue
        count += len(inner)
        if count > most or depth > _DEEPEST:
            raise CheckpointError(f"{what} holds more values, or deeper ones, than its bytes can")
        waiting += [(item, depth + 1) for item in inner]
