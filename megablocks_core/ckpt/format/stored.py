"""Read a checkpoint: every block is hashed before a byte of it is used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import NamedTuple

import torch
import xxhash

from megablocks_core.ckpt.format.manifest_reading import read_manifest
from megablocks_core.ckpt.manifest import BLOCK_BYTES, CheckpointError, Manifest
from megablocks_core.ckpt.places.places import MOST_PARTS, Place, Source


class Target(NamedTuple):
    """Memory that takes the bytes of a file from ``offset`` on, as many as it is long."""

    offset: int
    memory: memoryview


class Stored:
    """A checkpoint on disk, whose manifest and file sizes have been checked.

    Args:
        place: Its folder.
        sizes: Whether to ask for the size of every file; of many ranks one is enough.
        readers: How many ranks read at once, each of which needs the fewer threads.

    Attributes:
        manifest: What it holds.

    Raises:
        CheckpointError: It is not whole, or not what was written.
    """

    def __init__(self, place: Place, *, sizes: bool = True, readers: int = 1) -> None:
        self._place, self._readers = place, readers
        self.manifest = read_manifest(place)
        if sizes:
            check_sizes(place, self.manifest)

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
            threads = min(len(blocks), max(1, source.threads // self._readers))
            if threads <= 1:
                for block in blocks:
                    self._read(file, source, block)
                return
            with ThreadPoolExecutor(threads, thread_name_prefix="ckpt-read") as pool:
                list(pool.map(lambda block: self._read(file, source, block), blocks))

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
            for index in sorted(set(range(len(record.xxh3_128))) - held[file]):
                start = index * BLOCK_BYTES
                self._checked(file, start, min(start + BLOCK_BYTES, record.size))

    def bytes_of(self, file: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a file.

        Raises:
            CheckpointError: A block is not what was written.
        """
        return bytes(self._checked(file, start, stop))

    def _checked(self, file: str, start: int, stop: int) -> memoryview:
        memory = _memory(stop - start)
        self.fill(file, [Target(start, memory)])
        return memory

    def path(self, file: str) -> str:
        """What to call a file in an error."""
        return str(self._place.child(file))

    def _read(self, file: str, source: Source, block: _Block) -> None:
        parts = block.parts
        if len(parts) > MOST_PARTS:
            parts = [_memory(sum(part.nbytes for part in parts))]
        digest, offset = xxhash.xxh3_128(), block.index * BLOCK_BYTES
        for piece in _pieces(parts, source.step):
            try:
                source.read(piece, offset)
            except EOFError as error:
                raise CheckpointError(str(error)) from error
            for part in piece:
                digest.update(part)
                offset += part.nbytes
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


def _pieces(parts: Sequence[memoryview], step: int) -> Iterator[list[memoryview]]:
    """``parts``, cut where they reach multiples of ``step`` bytes."""
    piece, size = [], 0
    for part in parts:
        while part.nbytes:
            piece.append(part[: step - size])
            size += piece[-1].nbytes
            part = part[piece[-1].nbytes :]
            if size == step:
                yield piece
                piece, size = [], 0
    if piece:
        yield piece


def _full_block(index: int, parts: list[memoryview], filled: int, size: int) -> _Block:
    return _Block(index, parts + _gap(filled, min((index + 1) * BLOCK_BYTES, size)))


def _gap(start: int, stop: int) -> list[memoryview]:
    return [_memory(stop - start)] if stop > start else []


def _memory(length: int) -> memoryview:
    return torch.empty(length, dtype=torch.uint8).numpy().data


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
