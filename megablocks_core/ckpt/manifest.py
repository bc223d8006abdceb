"""The manifest of a checkpoint: what it holds, where each tensor lies, and a hash of it all.

``manifest.json`` lists the state, every tensor (dtype, whole shape, chunks of files) and
every file (size, xxh3-128 of each 4 MiB block, header included). Its last key is the
xxh3-128 of the text before that key, which ``LATEST`` repeats. docs/checkpoint.md is the
description of the format.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

MANIFEST = "manifest.json"
BLOCK_BYTES = 4 * 2**20
_FORMAT, _VERSION = "megablocks_core.ckpt", 1
_HASH_KEY = ',\n "xxh3_128": "'


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read, or is not what was written."""


@dataclass(frozen=True)
class Chunk:
    """A run of bytes in a file: one whole tensor."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class StoredAs:
    """One logical tensor in the checkpoint."""

    dtype: str
    shape: list[int]
    chunks: list[Chunk]


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
        """The manifest as written; sets ``digest``."""
        body = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        del body["digest"]
        head = json.dumps(body, indent=1).removesuffix("\n}")
        self.digest = xxhash.xxh3_128_hexdigest(head.encode())
        return f'{head}{_HASH_KEY}{self.digest}"\n}}\n'


def read_manifest(folder: Path) -> Manifest:
    """Read and check a checkpoint's manifest.

    Raises:
        CheckpointError: There is none, its hash differs, or it is of another format.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {MANIFEST}: it is not a finished checkpoint")
    text = path.read_bytes().decode(errors="replace")
    head, _, tail = text.rpartition(_HASH_KEY)
    digest = xxhash.xxh3_128_hexdigest(head.encode())
    if tail != f'{digest}"\n}}\n':
        raise CheckpointError(f"{path} is damaged: its hash is not the one it ends with")
    body = json.loads(text)
    if (body["format"], body["version"]) != (_FORMAT, _VERSION):
        raise CheckpointError(
            f"{path} has format {body['format']!r} version {body['version']}; "
            f"this library reads {_FORMAT!r} version {_VERSION}"
        )
    outside = [name for name in body["files"] if name in (".", "..") or Path(name).name != name]
    if outside:
        raise CheckpointError(f"{path} names files outside its folder: {outside}")
    return Manifest(
        body["saved_unix_ns"],
        body["state"],
        {
            name: StoredAs(one["dtype"], one["shape"], [Chunk(**part) for part in one["chunks"]])
            for name, one in body["tensors"].items()
        },
        {name: FileRecord(**record) for name, record in body["files"].items()},
        digest,
    )


class BlockHashes:
    """Hashes a file block by block while it is written."""

    def __init__(self) -> None:
        self.size = 0
        self._done: list[str] = []
        self._open = xxhash.xxh3_128()

    def update(self, data: memoryview) -> None:
        """Take the next bytes of the file."""
        while data:
            room = BLOCK_BYTES - self.size % BLOCK_BYTES
            self._open.update(data[:room])
            self.size += len(data[:room])
            if self.size % BLOCK_BYTES == 0:
                self._close_block()
            data = data[room:]

    def record(self) -> FileRecord:
        """The file's record, once all of it was seen."""
        if self.size % BLOCK_BYTES:
            self._close_block()
        return FileRecord(self.size, self._done)

    def _close_block(self) -> None:
        self._done.append(self._open.hexdigest())
        self._open = xxhash.xxh3_128()
