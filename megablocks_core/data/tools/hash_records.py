"""The hash of each document and its place, set aside on disk by hash, and read back in parts.

A record is 24 bytes. Records with one hash are in one part, in order of their places, and a part
takes no more memory than it may. The files have no name, so that nothing is left by a kill.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from typing import IO, Any

import numpy as np
import xxhash

from megablocks_core.data.indexed import IndexedDataset
from megablocks_core.data.tools.documents import blocks, pieces
from megablocks_core.files.progress import Progress

RECORD = np.dtype([("high", "<u8"), ("low", "<u8"), ("place", "<u8")])
FILES = 256  # open at once; more parts are made by reading each of them several times
# What a record may take while it is compared: itself, the table it goes to, their sorted copies.
WORKING = 8 * RECORD.itemsize
LEAST_MEMORY = 1 << 22


class HashRecords:
    """Records of some datasets, whose documents are numbered through, without empty ones.

    Args:
        datasets: In order of their places.
        memory: Bytes that parts may take while they are compared, with room for some tokens.
        folder: Where records are set aside, 24 bytes a document; by default the system's for
            temporary files.
        progress: Told of the bytes of tokens hashed.

    Attributes:
        starts: The place of each dataset's first document, and the number of all.
        empty: Documents without tokens of each.
    """

    def __init__(
        self,
        datasets: list[IndexedDataset],
        *,
        memory: int,
        folder: str | os.PathLike[str] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.starts = np.cumsum([0] + [dataset.num_documents for dataset in datasets])
        self.empty = [0] * len(datasets)
        # A part holds a few records more or fewer than the next: a fifth is left for that.
        parts = max(1, math.ceil(int(self.starts[-1]) * WORKING * 1.25 / memory))
        self._files: list[IO[bytes]] = []
        self._passes = math.ceil(parts / FILES)
        self._chunk = max(1, min(1 << 18, memory // (WORKING * 4)))
        self._documents = max(1, min(1 << 16, memory // 512))
        self._tokens = max(1, min(1 << 20, memory // 64))
        try:
            for _ in range(min(parts, FILES)):
                file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
                self._files.append(file)
            for number, dataset in enumerate(datasets):
                self._set_aside(dataset, number, progress)
        except BaseException:
            self.close()
            raise

    def parts(self) -> Iterator[Iterator[np.ndarray]]:
        """Each part, as chunks of records."""
        for file in self._files:
            for number in range(self._passes):
                yield self._chunks(file, number)

    def close(self) -> None:
        """Let the disk have its room back."""
        for file in self._files:
            file.close()

    def _set_aside(self, dataset: IndexedDataset, number: int, progress: Progress | None) -> None:
        for first, bounds in blocks(dataset, documents=self._documents):
            digests = self._hash(dataset, bounds)
            records = np.empty(len(digests), RECORD)
            records["high"] = digests[:, 0]
            records["low"] = digests[:, 1]
            records["place"] = np.arange(len(digests)) + (first + int(self.starts[number]))
            held = np.diff(bounds) > 0
            self.empty[number] += int(np.count_nonzero(~held))
            self._write(records[held])
            if progress:
                progress.add(int(bounds[-1] - bounds[0]) * dataset.dtype.itemsize)

    def _hash(self, dataset: IndexedDataset, bounds: np.ndarray) -> np.ndarray:
        """The xxh3-128 of each document's ids as int64, so that the stored dtype is no matter."""
        tokens: Any = dataset.tokens
        digests = bytearray()
        ends = bounds.tolist()
        read, until = memoryview(b""), ends[0]
        begin = until
        for start, stop in zip(ends, ends[1:], strict=False):
            if stop - start > self._tokens:
                whole = xxhash.xxh3_128()
                for a, b in pieces(start, stop, tokens=self._tokens):
                    whole.update(_as_int64(tokens[a:b]))
                digests += whole.digest()
                continue
            if stop > until or start < begin:
                begin, until = start, _reach(bounds, start, self._tokens)
                read = _as_int64(tokens[begin:until])
            digests += xxhash.xxh3_128_digest(read[8 * (start - begin) : 8 * (stop - begin)])
        return np.frombuffer(bytes(digests), "<u8").reshape(-1, 2)

    def _write(self, records: np.ndarray) -> None:
        chosen = (records["high"] % np.uint64(len(self._files))).astype(np.int64)
        order = np.argsort(chosen, kind="stable")
        ends = np.searchsorted(chosen[order], np.arange(len(self._files) + 1))
        data = records[order].view(np.uint8).data
        for file, start, stop in zip(self._files, ends.tolist(), ends[1:].tolist(), strict=False):
            left = data[start * RECORD.itemsize : stop * RECORD.itemsize]
            while left:
                left = left[file.write(left) :]

    def _chunks(self, file: IO[bytes], number: int) -> Iterator[np.ndarray]:
        file.seek(0)
        while data := file.read(self._chunk * RECORD.itemsize):
            while len(data) % RECORD.itemsize:
                data += file.read(RECORD.itemsize - len(data) % RECORD.itemsize)
            records = np.frombuffer(data, RECORD)
            if self._passes > 1:
                records = records[records["low"] % np.uint64(self._passes) == number]
            yield records


def _as_int64(tokens: np.ndarray) -> memoryview:
    return np.ascontiguousarray(tokens, "<i8").view(np.uint8).data


def _reach(bounds: np.ndarray, start: int, tokens: int) -> int:
    """The end of the last document that begins at ``start`` or later and fits a reading."""
    return int(bounds[bounds.searchsorted(start + tokens, "right") - 1])
