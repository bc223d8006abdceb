"""The manifest of a checkpoint: what it holds, where each tensor lies, and a hash of it all.

``manifest.json`` lists the state, every tensor (dtype, whole shape, chunks of files) and
every file (size, xxh3-128 of each 4 MiB block, header included). Its last key is the
xxh3-128 of the text before that key, which ``LATEST`` repeats. docs/checkpoint.md is the
description of the format.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import xxhash

from megablocks_core.files.safetensors import DTYPE_CODES
from megablocks_core.groups.cuts import Box

MANIFEST = "manifest.json"
BLOCK_BYTES = 4 * 2**20
# torch has no more.
MOST_DIMS = 64
FORMAT, VERSION = "megablocks_core.ckpt", 2
HASH_KEY = ',\n "xxh3_128": "'
# A manifest holds no later time.
LAST_TIME = 2**63 - 1
DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read, or is not what was written."""


@dataclass(frozen=True)
class Chunk:
    """A box of a whole tensor, as one run of bytes in a file, last dimension fastest.

    Attributes:
        file: Its file's name.
        offset: Where the run begins, counted from the start of the file.
        start: The box's first index in each dimension.
        shape: The box's length in each dimension.
    """

    file: str
    offset: int
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def box(self) -> Box:
        """The box, as slices of the whole."""
        ends = zip(self.start, self.shape, strict=True)
        return tuple(slice(start, start + length) for start, length in ends)


@dataclass(frozen=True)
class StoredAs:
    """One logical tensor in the checkpoint: its chunks cover it, each element once."""

    dtype: str
    shape: tuple[int, ...]
    chunks: list[Chunk]

    def end_of(self, chunk: Chunk) -> int:
        """Where the run of one of its chunks ends in the file."""
        return chunk.offset + prod(chunk.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class FileRecord:
    """One file: its size and the hash of each block."""

    size: int
    xxh3_128: list[str]


@dataclass
class Manifest:
    """All that is known of a checkpoint.

    Attributes:
        saved_unix_ns: When it was saved; above that of the checkpoint saved before it.
        state: By name in ``state``: its kind ("module", "optimizer", "tensor", "json") and,
            for the last and for optimizers, its JSON value.
        tensors: By "entry/name".
        files: By file name.
        digest: The manifest's own hash, set when it is written or read.
    """

    saved_unix_ns: int
    state: dict[str, dict[str, Any]]
    tensors: dict[str, StoredAs] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)
    digest: str = ""

    def text(self) -> str:
        """The manifest as written, a line for each entry, tensor and file; sets ``digest``."""
        head = ",\n".join(
            [
                f'{{\n "format": {json.dumps(FORMAT)}',
                f' "version": {VERSION}',
                f' "saved_unix_ns": {self.saved_unix_ns}',
                _lines("state", self.state.items()),
                _lines("tensors", ((name, _tensor(one)) for name, one in self.tensors.items())),
                _lines("files", ((name, vars(one)) for name, one in self.files.items())),
            ]
        )
        self.digest = xxhash.xxh3_128_hexdigest(head.encode())
        return f'{head}{HASH_KEY}{self.digest}"\n}}\n'


def next_time(now: int, newest: int) -> int:
    """The time of a new save: now, or later, so that it comes after the newest there is.

    After one that claims the last time that can be written it is that time again. Then ``LATEST``
    tells the two apart.
    """
    return min(max(now, newest + 1), LAST_TIME)


def _lines(key: str, items: Iterable[tuple[str, Any]]) -> str:
    rows = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in items]
    return f" {json.dumps(key)}: {{" + ("\n" + ",\n".join(rows) + "\n " if rows else "") + "}"


def _tensor(one: StoredAs) -> dict[str, Any]:
    chunks = [[part.file, part.offset, part.start, part.shape] for part in one.chunks]
    return {"dtype": one.dtype, "shape": one.shape, "chunks": chunks}
