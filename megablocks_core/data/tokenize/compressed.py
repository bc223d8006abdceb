"""Compressed files as a stream: their text in blocks of bounded size, and hashes of their bytes."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import xxhash

from megablocks_core.data.packages import package

_STEP = 1 << 12  # compressed bytes at a time: no frame makes more than 128 MiB of them
_BLOCK = 1 << 20


class Damaged(Exception):
    """The rest of a compressed file cannot be read."""


class Run(NamedTuple):
    """Whole lines of a compressed file, or its whole text.

    Attributes:
        data: The lines or text.
        pieces: Hashes of the pieces of the file that were read for them.
        nbytes: How many bytes of the file were.
        fault: Why the file ends after them, in the middle of a line or not; "" if it does not.
    """

    data: bytes
    pieces: bytes
    nbytes: int
    fault: str


class HashedReader:
    """Reads a file once from its beginning, and hashes it in pieces of ``piece`` bytes."""

    def __init__(self, path: str, piece: int) -> None:
        self._file = open(path, "rb")  # noqa: SIM115
        self._piece, self._room = piece, piece
        self._hash = xxhash.xxh3_128()
        self._pieces = bytearray()
        self.nbytes = 0

    def read(self, length: int) -> bytes:
        """The next bytes, at most so many; none at the end."""
        data = self._file.read(min(length, self._room))
        self._hash.update(data)
        self.nbytes += len(data)
        self._room -= len(data)
        if not self._room or (not data and self._room < self._piece):
            self._pieces += self._hash.digest()
            self._hash.reset()
            self._room = self._piece
        return data

    def take(self) -> tuple[bytes, int]:
        """Hashes of the pieces, and bytes, that were read since the last call."""
        taken = bytes(self._pieces), self.nbytes
        self._pieces.clear()
        self.nbytes = 0
        return taken

    def finish(self) -> None:
        """Read the rest, and close the file."""
        while self.read(_BLOCK):
            pass
        self._file.close()


def decompressed(reader: HashedReader, compression: str) -> Iterator[bytes]:
    """Blocks of the text of a gzip or zstd file, of one member or several.

    Raises:
        Damaged: The file is cut short, or is not what its name says.
    """
    make, fault = _decompressor(compression)
    stream, began, ended = make(), False, False
    data = reader.read(_STEP)
    while data:
        if ended and not began and compression == "gz":
            data = data.lstrip(b"\0")  # padding, as tapes have it
        if data:
            try:
                block = stream.decompress(data)
            except fault:
                raise Damaged("the compressed file is damaged") from None
            if block:
                yield block
            began = True
            data = b""
            if stream.eof:
                data, ended = stream.unused_data, True
                stream, began = make(), False
        data = data or reader.read(_STEP)
    if began:
        raise Damaged("the compressed file is cut short")


def runs_of_lines(path: str, compression: str, *, unit_bytes: int, max_bytes: int) -> Iterator[Run]:
    """The lines of a compressed file in runs of about ``unit_bytes``, the same each time.

    Of a line longer than ``max_bytes``, one byte more than that is handed on. What follows the
    last line end before a damage is not.
    """
    reader = HashedReader(path, unit_bytes)
    held, last = bytearray(), 0  # ``last``: where the last line begins
    skipping, fault = False, ""
    try:
        for block in decompressed(reader, compression):
            if skipping:
                if (end := block.find(b"\n")) < 0:
                    continue
                block, skipping = block[end:], False
            if (end := block.rfind(b"\n")) >= 0:
                last = len(held) + end + 1
            held += block
            if len(held) - last > max_bytes:
                del held[last + max_bytes + 1 :]
                skipping = True
            elif len(held) >= unit_bytes and last:
                yield Run(bytes(held[:last]), *reader.take(), "")
                del held[:last]
                last = 0
    except Damaged as damage:
        fault = str(damage)
        del held[last:]
    reader.finish()
    yield Run(bytes(held), *reader.take(), fault)


def whole_text(path: str, compression: str, *, piece: int, max_bytes: int) -> Run:
    """All the text of a compressed file, or a byte more than ``max_bytes`` of it."""
    reader, text, fault = HashedReader(path, piece), bytearray(), ""
    try:
        for block in decompressed(reader, compression):
            text += block
            if len(text) > max_bytes:
                del text[max_bytes + 1 :]
                break
    except Damaged as damage:
        fault = str(damage)
    reader.finish()
    return Run(bytes(text), *reader.take(), fault)


def _decompressor(compression: str) -> tuple[Any, type[Exception]]:
    if compression == "gz":
        return (lambda: zlib.decompressobj(wbits=31)), zlib.error
    zstandard = package("zstandard", what="a .zst file")
    return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj, zstandard.ZstdError
