"""Shards of mosaicml-streaming (MDS): ``index.json`` names them, their columns and hashes.

``mds_samples`` has the bytes inside. A column of pickles is never opened.
"""

from __future__ import annotations

import bz2
import hashlib
import io
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megablocks_core.data.convert.documents import BadSource, Batch, Counts
from megablocks_core.data.convert.mds_samples import (
    ARRAY_DTYPES,
    Damaged,
    array_of,
    columns,
    sample_of,
    shard_of,
)
from megablocks_core.data.convert.texts import Texts
from megablocks_core.data.packages import package
from megablocks_core.files import create_file, read_json

SHARD_BYTES = 1 << 26
COLUMN = "tokens"
HASHES = ("sha1", "xxh64")
_COLUMNS = (COLUMN, "input_ids", "text")


class MDSFolder:
    """The samples of a folder's shards, in order; a shard is held in memory at a time.

    Args:
        folder: With an ``index.json``.
        column: Of ids or of texts; by default the first there is of ``tokens``, ``input_ids``
            and ``text``.
        dtype: Of the ids, where the encoding of the column is ``bytes`` and does not say.

    Attributes:
        dtype: Of the ids; ``None`` where the column holds texts.

    Raises:
        ValueError: It is no such folder, a file is missing or is another than the index says, or
            the column holds neither ids nor texts.
    """

    tokenizer: str | None = None

    def __init__(self, folder: Path, column: str | None, dtype: np.dtype | None) -> None:
        self._folder, self._index = folder, folder / "index.json"
        index = read_json(self._index, dict)
        self._shards: list[dict[str, Any]] = index.get("shards") or []
        if index.get("version") != 2 or not self._shards:
            raise ValueError(f"{self._index}: must be of version 2, with shards")
        kinds = {self._encoding(shard, column) for shard in self._shards}
        if len(kinds) != 1:
            raise ValueError(f"{self._index}: its shards must have one kind of column, not {kinds}")
        self._column, self._kind = kinds.pop()
        self._bytes_dtype = dtype
        self.nbytes = sum(self._file(shard)[0].stat().st_size for shard in self._shards)
        self.dtype = self._dtype_of_first()

    def batches(self, counts: Counts) -> Iterator[Batch]:
        """The documents of a column of ids; a sample is one."""
        assert self.dtype is not None
        for path, nbytes, values in self._values():
            tokens = [self._ids(path, value) for value in values]
            lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
            joined = np.concatenate(tokens) if tokens else np.empty(0, self.dtype)
            if joined.dtype != self.dtype:
                raise BadSource(f"{path}: has ids of {joined.dtype}, must be {self.dtype}")
            yield Batch(joined, lengths, nbytes)

    def texts(self) -> Iterator[Texts]:
        """The texts of a column of texts."""
        for path, nbytes, values in self._values():
            try:
                yield Texts([bytes(value).decode() for value in values], nbytes)
            except UnicodeDecodeError as error:
                raise BadSource(f"{path}: column {self._column!r} is not UTF-8: {error}") from None

    def _values(self) -> Iterator[tuple[Path, int, list[memoryview]]]:
        """The column of each shard's samples."""
        for shard in self._shards:
            path, _ = self._file(shard)
            at = shard["column_names"].index(self._column)
            sizes, samples = shard["column_sizes"], shard["samples"]
            try:
                data = memoryview(self._read(shard))
                yield path, path.stat().st_size, list(columns(data, samples, sizes, at))
            except Damaged as error:
                raise BadSource(f"{path}: {error}") from None

    def _ids(self, path: Path, value: memoryview) -> np.ndarray:
        try:
            if self._kind != "bytes":
                return array_of(value, self._kind)
            assert self._bytes_dtype is not None
            if len(value) % self._bytes_dtype.itemsize:
                raise Damaged(f"has a sample of {len(value)} bytes, no whole number of tokens")
            return np.frombuffer(value, self._bytes_dtype)
        except Damaged as error:
            raise BadSource(f"{path}: {error}") from None

    def _dtype_of_first(self) -> np.dtype | None:
        if self._kind == "str":
            return None
        if self._kind == "bytes":
            if self._bytes_dtype is None or self._bytes_dtype.name not in ARRAY_DTYPES:
                raise ValueError(
                    f"source_dtype must be given: column {self._column!r} is bytes, which do not "
                    f"say; it must be one of {', '.join(ARRAY_DTYPES)}"
                )
            return self._bytes_dtype
        if ":" in self._kind:
            return np.dtype(self._kind.split(":")[1])
        path, _, values = next(self._values())
        return self._ids(path, values[0]).dtype if values else np.dtype(np.int64)

    def _encoding(self, shard: dict[str, Any], column: str | None) -> tuple[str, str]:
        try:
            if shard["format"] != "mds" or shard["version"] != 2:
                raise ValueError(f"{self._index}: shards must be of version 2 of mds")
            names, encodings = shard["column_names"], shard["column_encodings"]
            wanted = [column] if column else _COLUMNS
            found = next((name for name in wanted if name in names), None)
            if found is None:
                text = f"has the columns {names}, must have {' or '.join(wanted)}"
                raise ValueError(f"{self._index}: {text}")
            kind = encodings[names.index(found)]
            if len(shard["column_sizes"]) != len(names) or type(shard["samples"]) is not int:
                raise BadSource(f"{self._index}: does not describe its shards")
        except (KeyError, TypeError, AttributeError, IndexError):
            raise BadSource(f"{self._index}: does not describe its shards") from None
        base, *given = kind.split(":")
        if base not in ("ndarray", "bytes", "str") or (given and given[0] not in ARRAY_DTYPES):
            raise ValueError(
                f"{self._index}: column {found!r} is {kind}, must be ndarray, bytes or str"
            )
        return found, kind

    def _file(self, shard: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
        """The file of a shard, plain if it is there, else compressed; and what is said of it."""
        for key in ("raw_data", "zip_data"):
            try:
                said = shard[key]
                name, _ = (said["basename"], said["bytes"]) if said else ("", 0)
            except (KeyError, TypeError):
                raise BadSource(f"{self._index}: does not describe its shards") from None
            if name and os.path.basename(name) != name:
                raise BadSource(f"{self._index}: {name!r} must be a file beside it")
            if name and (self._folder / name).is_file():
                return self._folder / name, said
        raise BadSource(f"{self._folder / shard['raw_data']['basename']} is missing")

    def _read(self, shard: dict[str, Any]) -> bytes:
        """The plain bytes of a shard, checked by all the hashes that are said."""
        path, said = self._file(shard)
        data = path.read_bytes()
        _refuse_changed(path, data, said)
        if said is shard["raw_data"]:
            return data
        whole = _decompressed(path, data, str(shard["compression"]), shard["raw_data"]["bytes"])
        _refuse_changed(path, whole, shard["raw_data"])
        return whole


def write_mds(
    folder: Path,
    batches: Iterator[Batch],
    dtype: np.dtype,
    shard_bytes: int,
    compression: str | None,
) -> int:
    """Write shards of at most so many bytes, or one document; returns how many.

    Plain shards are those that ``MDSWriter`` writes, byte for byte.
    """
    if dtype.name not in ARRAY_DTYPES:
        raise ValueError(f"target_dtype={dtype.name} must be one of {', '.join(ARRAY_DTYPES)}")
    shared: dict[str, Any] = {
        "version": 2,
        "format": "mds",
        "compression": compression,
        "hashes": list(HASHES),
        "size_limit": shard_bytes,
        "column_names": [COLUMN],
        "column_encodings": [f"ndarray:{dtype.name}"],
        "column_sizes": [None],
    }
    described = json.dumps(shared, sort_keys=True).encode()
    empty = 8 + len(described)
    shards: list[dict[str, Any]] = []
    samples, size = [], empty

    def flush() -> None:
        data = shard_of(samples, described)
        files = _write_shard(folder, len(shards), data, compression)
        shards.append({**shared, **files, "samples": len(samples)})

    for batch in batches:
        for document in batch.documents():
            sample = sample_of(document)
            if samples and size + len(sample) + 4 > shard_bytes:
                flush()
                samples, size = [], empty
            samples.append(sample)
            size += len(sample) + 4
    if samples:
        flush()
    index = json.dumps({"version": 2, "shards": shards}, sort_keys=True)
    create_file(folder / "index.json", index.encode())
    return len(shards)


def compression_level(compression: str | None) -> int | None:
    """The level in ``zstd`` or ``zstd:LEVEL``.

    Raises:
        ValueError: It is neither.
    """
    if compression is None:
        return None
    name, _, level = compression.partition(":")
    if name != "zstd" or not (level or "3").isdecimal() or not 1 <= int(level or 3) <= 22:
        raise ValueError(f"compression={compression!r} must be zstd or zstd:LEVEL, 1 to 22")
    return int(level or 3)


def _write_shard(folder: Path, number: int, data: bytes, compression: str | None) -> dict[str, Any]:
    name = f"shard.{number:05}.mds"
    said = {"raw_data": _described(name, data), "zip_data": None}
    if (level := compression_level(compression)) is not None:
        name += ".zstd"
        zstandard = package("zstandard", what=f"compression={compression!r}")
        data = zstandard.ZstdCompressor(level).compress(data)
        said["zip_data"] = _described(name, data)
    create_file(folder / name, data)
    return said


def _described(name: str, data: bytes) -> dict[str, Any]:
    hashes = {kind: _hash(kind, data) for kind in HASHES}
    return {"basename": name, "bytes": len(data), "hashes": hashes}


def _hash(kind: str, data: bytes) -> str | None:
    """The hash of a kind that is known, which is not one of all that are."""
    if kind in xxhash.algorithms_available:
        return getattr(xxhash, kind)(data).hexdigest()
    if kind in hashlib.algorithms_available and not kind.startswith("shake"):
        return hashlib.new(kind, data, usedforsecurity=False).hexdigest()
    return None


def _refuse_changed(path: Path, data: bytes, said: dict[str, Any]) -> None:
    if len(data) != said["bytes"]:
        raise BadSource(f"{path}: holds {len(data)} bytes, must hold {said['bytes']}")
    for kind, expected in (said.get("hashes") or {}).items():
        if (found := _hash(kind, data)) not in (None, expected):
            raise BadSource(f"{path}: has the {kind} {found}, must have {expected}")


def _decompressed(path: Path, data: bytes, compression: str, size: int) -> bytes:
    """At most a byte more than the plain size that is said."""
    kind = compression.partition(":")[0]
    try:
        if kind == "zstd":
            zstandard = package("zstandard", what="a shard compressed by zstd")
            reader = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data))
            return reader.read(size + 1)
        if kind == "gz":
            return zlib.decompressobj(wbits=31).decompress(data, size + 1)
        if kind == "bz2":
            return bz2.BZ2Decompressor().decompress(data, size + 1)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # each of the three has its own
        raise BadSource(f"{path}: cannot be decompressed: {error}") from None
    raise ValueError(f"{path}: compression {compression!r} must be zstd, gz or bz2")
