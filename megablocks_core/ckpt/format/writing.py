"""Write a rank's files: each 4 MiB block is hashed by the caller while a thread writes another.

A tensor on the CPU is hashed and written from where it lies; small ones are copied together. One
thread writes a file, for a file system lets one write to it at a time; different files have
different threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import BoundedSemaphore
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from megablocks_core.ckpt.manifest import BLOCK_BYTES, Chunk, FileRecord, StoredAs
from megablocks_core.ckpt.places.places import MOST_PARTS, Place, Sink
from megablocks_core.files.safetensors import DTYPE_CODES, Layout, layout
from megablocks_core.groups import Whole, as_bytes

# Files written at once, and writes of at most a block that wait in all.
THREADS, WAITING = 4, 8
# Tensors, or parts of them in a block, below this many bytes are copied and written together.
_SMALL = 2**18


class Item(NamedTuple):
    """One box of a logical tensor, as a tensor of a safetensors file.

    Attributes:
        key: Its name in the file.
        name: Of the logical tensor, "entry/name".
        dtype: Of both.
        start: The box's first index in each dimension of the whole.
        shape: The box's length in each dimension.
        whole_shape: Of the logical tensor.
    """

    key: str
    name: str
    dtype: torch.dtype
    start: tuple[int, ...]
    shape: tuple[int, ...]
    whole_shape: tuple[int, ...]


class FileToWrite(NamedTuple):
    """A safetensors file and the order of what is in it, which must be widest dtype first."""

    file: str
    items: Sequence[Item]
    metadata: Mapping[str, str] = {"format": "pt"}

    def layout(self) -> Layout:
        """Where everything lies in it."""
        wholes = [Whole(item.key, item.shape, item.dtype) for item in self.items]
        return layout(wholes, self.metadata)


class Receipt(NamedTuple):
    """What a rank wrote: its chunks of each logical tensor, and its files."""

    tensors: dict[str, StoredAs]
    files: dict[str, FileRecord]


class Writer:
    """One rank's files, under a folder.

    Args:
        place: The folder.
        files: The files, none of which may be there. All are made at once.
    """

    def __init__(self, place: Place, files: Sequence[FileToWrite]) -> None:
        self._room = BoundedSemaphore(WAITING)
        self._error: BaseException | None = None
        self._tensors: dict[str, StoredAs] = {}
        self._files: dict[str, _OpenFile] = {}
        self._lanes = [
            ThreadPoolExecutor(1, thread_name_prefix="ckpt-write")
            for _ in range(min(len(files), THREADS))
        ]
        try:
            for number, file in enumerate(files):
                lane = self._lanes[number % THREADS]
                self._files[file.file] = _OpenFile(place.create(file.file), file, self, lane)
        except BaseException:
            self.close()
            raise

    def add(self, file: str, key: str, tensor: Tensor) -> None:
        """Write the next item of a file.

        ``tensor`` may lie on any device and have any strides. It must not change before
        ``finish`` returns. Waits while ``WAITING`` writes are on their way to the disk.

        Raises:
            OSError: Something added before could not be written.
        """
        tensor = tensor.detach().cpu()
        item, chunk = self._files[file].next_item(key, tensor)
        stored = StoredAs(DTYPE_CODES[item.dtype], item.whole_shape, [])
        self._tensors.setdefault(item.name, stored).chunks.append(chunk)
        self._files[file].take(as_bytes(tensor).numpy().data)

    def finish(self) -> Receipt:
        """Wait until all files are complete and durable.

        Raises:
            OSError: The first error of any thread.
        """
        for file in self._files.values():
            file.end()
        for lane in self._lanes:
            lane.shutdown()
        if self._error is not None:
            raise self._error
        records = {name: file.record() for name, file in self._files.items()}
        return Receipt(self._tensors, records)

    def close(self) -> None:
        """Stop the threads and close the files, whole or not."""
        for lane in self._lanes:
            lane.shutdown(cancel_futures=True)
        for file in self._files.values():
            with suppress(OSError):
                file.sink.close()

    def submit(self, lane: ThreadPoolExecutor, work: Callable[[], None]) -> None:
        """Have ``work`` done by the thread of a lane; raises what went wrong before."""
        self._room.acquire()
        if self._error is not None:
            self._room.release()
            raise self._error
        lane.submit(self._run, work)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            if self._error is None:
                work()
        except BaseException as error:
            self._error = self._error or error
        finally:
            self._room.release()


class _OpenFile:
    """A file on its way: cuts the run of bytes it is given into blocks."""

    def __init__(
        self, sink: Sink, file: FileToWrite, writer: Writer, lane: ThreadPoolExecutor
    ) -> None:
        self.sink = sink
        self._file, self._writer, self._lane = file, writer, lane
        self._waiting = list(file.items)[::-1]
        self._layout = file.layout()
        self._parts: list[memoryview] = []
        self._digest = xxhash.xxh3_128()
        self._taken = self._sent = 0
        self._hashes: list[str] = []
        self.take(memoryview(self._layout.header))

    def next_item(self, key: str, tensor: Tensor) -> tuple[Item, Chunk]:
        item = self._waiting.pop()
        given = (key, tensor.dtype, tuple(tensor.shape))
        assert given == (item.key, item.dtype, tuple(item.shape)), (given, item)
        offset = self._layout.offsets[key]
        return item, Chunk(self._file.file, offset, tuple(item.start), tuple(item.shape))

    def take(self, data: memoryview) -> None:
        while data.nbytes:
            part = data[: BLOCK_BYTES - self._taken % BLOCK_BYTES]
            data = data[part.nbytes :]
            self._digest.update(part)
            self._taken += part.nbytes
            if part.nbytes < _SMALL:
                part = memoryview(bytes(part))
            self._parts.append(part)
            if part.nbytes >= _SMALL or self._taken % BLOCK_BYTES == 0:
                self._send()

    def end(self) -> None:
        assert not self._waiting and self._taken == self._layout.size
        self._send()
        self._writer.submit(self._lane, self.sink.finish)

    def record(self) -> FileRecord:
        return FileRecord(self._taken, self._hashes)

    def _send(self) -> None:
        """Have what waits written; a block that is complete, or the last, has its hash."""
        parts, self._parts = self._parts, []
        if parts:
            offset, self._sent = self._sent, self._taken
            if len(parts) > MOST_PARTS:
                parts = [memoryview(b"".join(parts))]
            self._writer.submit(self._lane, partial(self.sink.write, parts, offset))
        if self._taken > len(self._hashes) * BLOCK_BYTES and (
            self._taken % BLOCK_BYTES == 0 or self._taken == self._layout.size
        ):
            self._hashes.append(self._digest.hexdigest())
            self._digest = xxhash.xxh3_128()
