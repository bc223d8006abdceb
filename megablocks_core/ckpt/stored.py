"""Read a checkpoint: every block is hashed before a byte of it is used."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from math import prod
from types import EllipsisType
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from megablocks_core.ckpt.manifest import (
    BLOCK_BYTES,
    DTYPES,
    CheckpointError,
    Chunk,
    Manifest,
    StoredAs,
)
from megablocks_core.ckpt.manifest_reading import read_manifest
from megablocks_core.ckpt.places import MOST_PARTS, Place, Source, place_of

THREADS = 3


class Target(NamedTuple):
    """Memory that takes the bytes of a file from ``offset`` on, as many as it is long."""

    offset: int
    memory: memoryview


class Stored:
    """A checkpoint on disk, whose manifest and file sizes have been checked.

    Attributes:
        manifest: What it holds.
        tensors: Lazy tensors by "entry/name".

    Raises:
        CheckpointError: It is not whole, or not what was written.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self.manifest = read_manifest(place)
        check_sizes(place, self.manifest)
        self.tensors = {
            name: StoredTensor(name, stored, self) for name, stored in self.manifest.tensors.items()
        }
        self._kept: tuple[str, int, memoryview] | None = None

    def fill(self, file: str, targets: Sequence[Target]) -> None:
        """Read each block of ``file`` in which a target lies, once, straight into the targets.

        The targets are in rising order and do not overlap; what lies between them in a block is
        read and hashed too. A few threads work at once. Every byte has been checked when this
        returns; when it raises, the targets hold anything.

        Raises:
            CheckpointError: A block is not what was written.
        """
        blocks = list(_blocks(targets, self.manifest.files[file].size))
        with closing(self._place.open(file)) as source:
            if len(blocks) == 1:
                self._read(file, source, blocks[0])
                return
            with ThreadPoolExecutor(THREADS, thread_name_prefix="ckpt-read") as pool:
                list(pool.map(lambda block: self._read(file, source, block), blocks))

    def bytes_of(self, file: str, start: int, stop: int) -> memoryview:
        """Bytes [start, stop) of a file; the last block is kept for the small tensors in it."""
        first, last = start // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES
        if self._kept is None or self._kept[:2] != (file, last) or first != last:
            end = min((last + 1) * BLOCK_BYTES, self.manifest.files[file].size)
            memory = _memory(end - first * BLOCK_BYTES)
            self.fill(file, [Target(first * BLOCK_BYTES, memory)])
            self._kept = (file, last, memory[(last - first) * BLOCK_BYTES :])
        else:
            memory = self._kept[2]
        return memory[start - first * BLOCK_BYTES : stop - first * BLOCK_BYTES]

    def check_rest(self) -> None:
        """Check the blocks in which no tensor has a byte: long headers, ``config.json``.

        Raises:
            CheckpointError: A block is not what was written.
        """
        held: dict[str, set[int]] = {file: set() for file in self.manifest.files}
        for stored in self.manifest.tensors.values():
            for chunk in stored.chunks:
                first, end = chunk.offset // BLOCK_BYTES, stored.end_of(chunk)
                if end > chunk.offset:
                    held[chunk.file].update(range(first, (end - 1) // BLOCK_BYTES + 1))
        for file, record in self.manifest.files.items():
            rest = set(range(len(record.xxh3_128))) - held[file]
            memory = _memory(min(BLOCK_BYTES, record.size))
            for index in sorted(rest):
                length = min(BLOCK_BYTES, record.size - index * BLOCK_BYTES)
                self.fill(file, [Target(index * BLOCK_BYTES, memory[:length])])

    def damaged_blocks(self, file: str) -> list[int]:
        """Every block of a file that is not what was written."""
        record = self.manifest.files[file]
        memory, damaged = _memory(min(BLOCK_BYTES, record.size)), []
        for index in range(len(record.xxh3_128)):
            length = min(BLOCK_BYTES, record.size - index * BLOCK_BYTES)
            try:
                self.fill(file, [Target(index * BLOCK_BYTES, memory[:length])])
            except CheckpointError:
                damaged.append(index)
        return damaged

    def path(self, file: str) -> str:
        """What to call a file in an error."""
        return str(self._place.child(file))

    def _read(self, file: str, source: Source, block: _Block) -> None:
        parts = block.parts
        if len(parts) > MOST_PARTS:
            parts = [_memory(sum(part.nbytes for part in parts))]
        try:
            source.read(parts, block.index * BLOCK_BYTES)
        except EOFError as error:
            raise CheckpointError(str(error)) from error
        digest = xxhash.xxh3_128()
        for part in parts:
            digest.update(part)
        if digest.hexdigest() != self.manifest.files[file].xxh3_128[block.index]:
            raise CheckpointError(
                f"{self.path(file)} is damaged: block {block.index} (from byte "
                f"{block.index * BLOCK_BYTES}) is not what was written"
            )
        if len(parts) != len(block.parts):
            start = 0
            for part in block.parts:
                part[:] = parts[0][start : start + part.nbytes]
                start += part.nbytes


class StoredTensor:
    """A whole tensor in a checkpoint, of which the asked slices are read when it is indexed."""

    def __init__(self, name: str, stored: StoredAs, source: Stored) -> None:
        self.name, self.dtype = name, DTYPES[stored.dtype]
        self._stored, self._source = stored, source

    def get_shape(self) -> list[int]:
        """Its whole shape, as safetensors' lazy slices give it."""
        return list(self._stored.shape)

    def __getitem__(self, index: EllipsisType | tuple[slice, ...]) -> Tensor:
        """Read slices with step 1, from every chunk that holds a part of them."""
        index = index if isinstance(index, tuple) else ()
        shape = self._stored.shape
        index += (slice(None),) * (len(shape) - len(index))
        box = [range(*part.indices(length)) for part, length in zip(index, shape, strict=True)]
        out = torch.empty([len(part) for part in box], dtype=self.dtype)
        for chunk in self._stored.chunks:
            meet = [
                range(max(a.start, b.start), min(a.stop, b.stop))
                for a, b in zip(box, chunk.box, strict=True)
            ]
            if all(meet):
                into = _inside(meet, [part.start for part in box])
                out[into] = self._part(chunk, meet)
        return out

    def _part(self, chunk: Chunk, meet: list[range]) -> Tensor:
        """The part of a chunk that is asked for; its rows are read in full."""
        rows = meet[0] if meet else range(1)
        first = chunk.start[0] if meet else 0
        row_bytes = self.dtype.itemsize * prod(chunk.shape[1:])
        start = chunk.offset + (rows.start - first) * row_bytes
        raw = self._source.bytes_of(chunk.file, start, start + len(rows) * row_bytes)
        part = torch.frombuffer(raw, dtype=torch.uint8).clone().view(self.dtype)
        part = part.view((len(rows), *chunk.shape[1:]) if meet else ())
        return part[(slice(None), *_inside(meet[1:], chunk.start[1:]))] if meet else part


class _Block(NamedTuple):
    """A block of a file, and the memory that all its bytes go to."""

    index: int
    parts: list[memoryview]


def _blocks(targets: Sequence[Target], size: int) -> Iterator[_Block]:
    """The blocks in which targets lie; what lies between those goes to memory of its own."""
    index, parts, filled = -1, [], 0
    for offset, memory in targets:
        assert offset >= max(filled, 0) and offset + memory.nbytes <= size
        while memory.nbytes:
            if offset // BLOCK_BYTES != index:
                if parts:
                    yield _full_block(index, parts, filled, size)
                index = offset // BLOCK_BYTES
                parts, filled = [], index * BLOCK_BYTES
            parts += _gap(filled, offset)
            part = memory[: (index + 1) * BLOCK_BYTES - offset]
            parts.append(part)
            offset += part.nbytes
            filled, memory = offset, memory[part.nbytes :]
    if parts:
        yield _full_block(index, parts, filled, size)


def _full_block(index: int, parts: list[memoryview], filled: int, size: int) -> _Block:
    return _Block(index, parts + _gap(filled, min((index + 1) * BLOCK_BYTES, size)))


def _gap(start: int, stop: int) -> list[memoryview]:
    return [_memory(stop - start)] if stop > start else []


def _memory(length: int) -> memoryview:
    return torch.empty(length, dtype=torch.uint8).numpy().data


def _inside(box: Sequence[range], start: Sequence[int]) -> tuple[slice, ...]:
    """``box``, counted from ``start``."""
    return tuple(
        slice(part.start - first, part.stop - first) for part, first in zip(box, start, strict=True)
    )


def check_sizes(place: Place, manifest: Manifest) -> None:
    """Check that every file is there in full.

    Raises:
        CheckpointError: The files that are missing or of another size, with both sizes.
    """
    faults = []
    for name, record in manifest.files.items():
        size = place.size(name)
        if size is None:
            faults.append(f"{place.child(name)} is missing")
        elif size != record.size:
            faults.append(f"{place.child(name)} has {size} bytes, {record.size} were written")
    if faults:
        raise CheckpointError("; ".join(faults))


def verify(path: str | os.PathLike[str]) -> None:
    """Read all of the checkpoint ``path`` and compare it with what was written.

    Raises:
        CheckpointError: What is wrong: files that are missing or cut short, or the damaged
            blocks and the tensors that lie in them.
    """
    stored = Stored(place_of(path))
    faults = []
    for file, record in stored.manifest.files.items():
        for block in stored.damaged_blocks(file):
            start, stop = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, record.size)
            held = [
                name
                for name, tensor in stored.manifest.tensors.items()
                for chunk in tensor.chunks
                if chunk.file == file and chunk.offset < stop and start < tensor.end_of(chunk)
            ]
            faults.append(f"{stored.path(file)} is damaged in bytes {start} to {stop}, in {held}")
    if faults:
        raise CheckpointError("; ".join(faults))
