"""Read boxes of a safetensors file's tensors, straight into memory where that can be.

Nothing is mapped: what was read is in its target and nowhere else, so that a reader's memory is
what it holds and a bounded buffer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import product
from math import prod
from pathlib import Path
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from megablocks_core.files.safetensors import DTYPES, Entry, read_header
from megablocks_core.groups import as_bytes

Box = tuple[slice, ...]

# What is read at a time: short enough to be in a core's cache when it is looked at next.
STEP_BYTES = 2**21
# Between two runs of a row-wise cut: reading across so many bytes takes less than another call.
_GAP_BYTES = 2**16


def open_tensors(path: Path) -> dict[str, FileTensor]:
    """The tensors of a safetensors file, by name, in the order of its header.

    They hold the file open; it is closed with the last of them.

    Raises:
        ValueError: The header says what cannot be.
        OSError: The file cannot be read.
    """
    file = TensorFile(path)
    entries = read_header(file.bytes, file.size)
    return {name: FileTensor(file, name, entry) for name, entry in entries.items()}


class TensorFile:
    """A file that is open for reading, and closed with its last user.

    Args:
        path: The file.

    Attributes:
        path: The file.
        size: How many bytes it had when it was opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        finalize(self, os.close, self._descriptor)
        self.size = os.fstat(self._descriptor).st_size

    def read(self, memory: memoryview, offset: int) -> None:
        """Fill ``memory`` with the bytes from ``offset`` on.

        Raises:
            ValueError: The file has become shorter.
        """
        while memory.nbytes:
            done = os.preadv(self._descriptor, [memory], offset)
            if not done:
                raise ValueError(f"{self.path} is cut short: it ends before byte {offset + 1}")
            memory, offset = memory[done:], offset + done

    def bytes(self, start: int, stop: int) -> bytes:
        """The bytes [start, stop)."""
        data = bytearray(stop - start)
        self.read(memoryview(data), start)
        return bytes(data)


class FileTensor:
    """A tensor of a file, whose values are read when a box of it is asked for.

    Attributes:
        file: Where it is.
        name: Its name there.
        offset: Where its bytes begin.
        dtype: As torch has it.
    """

    def __init__(self, file: TensorFile, name: str, entry: Entry) -> None:
        self.file, self.name = file, name
        self.dtype = DTYPES[entry.dtype]
        self._code, self._shape, self.offset = entry

    def get_shape(self) -> tuple[int, ...]:
        """The shape of the whole."""
        return self._shape

    def get_dtype(self) -> str:
        """The dtype, as safetensors writes it."""
        return self._code

    def __getitem__(self, box: Any) -> Tensor:
        whole_box = full_box(box, self._shape)
        lengths = [part.stop - part.start for part in whole_box]
        values = torch.empty(lengths, dtype=self.dtype, device="cpu")
        self.read_into(values, whole_box)
        return values

    def read_into(self, target: Tensor, box: Any) -> None:
        """Fill ``target``, of a box's shape, with its values, cast to the target's dtype."""
        box = full_box(box, self._shape)
        lengths = tuple(part.stop - part.start for part in box)
        if tuple(target.shape) != lengths:
            raise ValueError(f"target of shape {tuple(target.shape)} must have shape {lengths}")
        if not prod(lengths):
            return
        if not self._shape:  # one row of one number
            box, target, shape = (slice(0, 1),), target.unsqueeze(0), (1,)
        else:
            shape = self._shape
        last = max((dim for dim, part in enumerate(box) if _cuts(part, shape[dim])), default=0)
        if last == 0 and self._fits(target):
            row = prod(shape[1:]) * self.dtype.itemsize
            self.file.read(_memory(target), self.offset + box[0].start * row)
        else:
            self._read_rows(target, box, shape, last)

    def _read_rows(self, target: Tensor, box: Box, shape: tuple[int, ...], last: int) -> None:
        """Read rows that lie side by side, some at a time, and take the box out of them.

        ``last`` is the last dimension that the box cuts; a row is an index of the one before it.
        """
        size = self.dtype.itemsize
        steps = [prod(shape[dim + 1 :]) * size for dim in range(len(shape))]
        dim = max(last - 1, 0)
        while dim < len(shape) - 1 and steps[dim] > STEP_BYTES:
            dim += 1
        inside = box[dim + 1 :]
        start = sum(part.start * step for part, step in zip(inside, steps[dim + 1 :], strict=True))
        length = prod(part.stop - part.start for part in inside) * size
        side_by_side = length == steps[dim]
        alone = steps[dim] - length > _GAP_BYTES
        count = 1 if alone else max(1, STEP_BYTES // steps[dim])
        for outer in product(*(range(part.start, part.stop) for part in box[:dim])):
            first = self.offset + sum(at * step for at, step in zip(outer, steps, strict=False))
            own = target[tuple(at - part.start for at, part in zip(outer, box, strict=False))]
            for low in range(box[dim].start, box[dim].stop, count):
                rows = min(count, box[dim].stop - low)
                into = own[low - box[dim].start :][:rows]
                offset = first + low * steps[dim]
                if alone or side_by_side:
                    self._read_run(into, offset + start)
                    continue
                whole = torch.empty((rows, *shape[dim + 1 :]), dtype=self.dtype, device="cpu")
                self.file.read(_memory(whole), offset)
                into.copy_(whole[(slice(None), *inside)])

    def _read_run(self, into: Tensor, offset: int) -> None:
        if self._fits(into):
            self.file.read(_memory(into), offset)
            return
        run = torch.empty(into.shape, dtype=self.dtype, device="cpu")
        self.file.read(_memory(run), offset)
        into.copy_(run)

    def _fits(self, target: Tensor) -> bool:
        """Whether bytes may be put straight into the target's memory."""
        return is_plain(target) and target.dtype == self.dtype and target.is_contiguous()


def full_box(box: Any, shape: tuple[int, ...]) -> Box:
    """A slice with both ends for each dimension of ``shape``, of slices for some or ``...``."""
    given = box if isinstance(box, tuple) else (box,)
    slices = [] if given[:1] == (...,) else list(given)
    slices += [slice(None)] * (len(shape) - len(slices))
    ends = [part.indices(size) for part, size in zip(slices, shape, strict=True)]
    return tuple(slice(start, max(start, stop)) for start, stop, _ in ends)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is nothing but memory of the host."""
    known = type(tensor) in (Tensor, torch.nn.Parameter)
    return known and tensor.device.type == "cpu" and tensor.layout == torch.strided


def boxes(box: Box, itemsize: int, limit: int) -> Iterator[Box]:
    """A box in parts of at most ``limit`` bytes, which are contiguous in it, in their order."""
    lengths = [part.stop - part.start for part in box]
    if not prod(lengths):
        return
    dim, row = len(box), itemsize
    while dim > 0 and row * lengths[dim - 1] <= limit:
        dim -= 1
        row *= lengths[dim]
    if dim == 0:
        yield box
        return
    dim -= 1  # the first dimension whose indices fit, some at a time
    count = max(1, limit // row)
    for outer in product(*(range(part.start, part.stop) for part in box[:dim])):
        before = tuple(slice(at, at + 1) for at in outer)
        for low in range(box[dim].start, box[dim].stop, count):
            part = slice(low, min(low + count, box[dim].stop))
            yield (*before, part, *box[dim + 1 :])


def _cuts(part: slice, size: int) -> bool:
    return part.stop - part.start < size


def _memory(tensor: Tensor) -> memoryview:
    return as_bytes(tensor.detach()).numpy().data
