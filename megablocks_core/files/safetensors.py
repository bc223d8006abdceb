"""Write a safetensors file from front to back, as values come.

The format: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from megablocks_core.files import disk
from megablocks_core.groups import Whole, as_bytes

# The format's names of dtypes.
DTYPE_CODES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
}

# Dtypes by these names, and by those of what is read but not written.
DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}
DTYPES |= {"F8_E8M0": torch.float8_e8m0fnu, "C64": torch.complex64}
# What other readers of the format accept.
_LONGEST_HEADER = 100_000_000
# What torch takes; the product of many more lengths would take for ever.
_MOST_DIMS = 64


class Layout(NamedTuple):
    """Where everything lies in a safetensors file.

    Attributes:
        header: The bytes before the first tensor.
        offsets: For each tensor, where its bytes begin, counted from the start of the file.
        size: Of the whole file.
    """

    header: bytes
    offsets: dict[str, int]
    size: int


def layout(wholes: Sequence[Whole], metadata: Mapping[str, str] | None = None) -> Layout:
    """The layout of a file of ``wholes`` in this order, which must be widest dtype first."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    starts, end = {}, 0
    for whole in wholes:
        starts[whole.name], start, end = end, end, end + whole.nbytes
        header[whole.name] = {
            "dtype": DTYPE_CODES[whole.dtype],
            "shape": list(whole.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data = 8 + len(text)
    offsets = {name: data + start for name, start in starts.items()}
    return Layout(len(text).to_bytes(8, "little") + text, offsets, data + end)


class Entry(NamedTuple):
    """One tensor in a header: its dtype's code, and where its bytes begin in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


def read_header(read: Callable[[int, int], bytes], size: int) -> dict[str, Entry]:
    """The tensors of a file of ``size`` bytes; no more than its header is read.

    Args:
        read: Bytes [start, stop) of the file.
        size: Of the file.

    Raises:
        ValueError: The header says what cannot be: it is longer than the file or than 100 MB, is
            no JSON of the format, has a name twice, metadata that are no texts, or its tensors
            overlap or do not fill the file.
    """
    length = int.from_bytes(read(0, 8), "little") if size >= 8 else size
    if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
        raise ValueError(f"a header of {length} bytes cannot be in a file of {size}")
    try:
        header = json.loads(read(8, 8 + length), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise ValueError("the header is not an object")
    said = header.pop("__metadata__", {})
    if not (isinstance(said, dict) and all(isinstance(text, str) for text in said.values())):
        raise ValueError(f"__metadata__ must hold texts by name, not {str(said)[:99]}")
    entries, runs = {}, []
    for name, one in header.items():
        start, stop = _span(name, one)
        entries[name] = Entry(one["dtype"], tuple(one["shape"]), 8 + length + start)
        runs.append((start, stop, name))
    end = 0
    for start, stop, name in sorted(runs):
        if start != end:
            raise ValueError(f"the bytes of {name!r} must begin at {end}, not at {start}")
        end = stop
    if end != size - 8 - length:
        raise ValueError(f"the tensors fill {end} bytes of {size - 8 - length}")
    return entries


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, in which each name comes once."""
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"{counts.most_common(1)[0][0]!r} must come once in an object")
    return found


def _span(name: str, one: Any) -> tuple[int, int]:
    """The data offsets of one entry of a header, which must be of the right types and size."""
    entry = one if isinstance(one, dict) else {}
    code, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if isinstance(code, str) and code in DTYPES and _are_lengths(shape) and _are_lengths(span):
        start, stop = span if len(span) == 2 else (0, -1)
        if stop - start == prod(shape) * DTYPES[code].itemsize:
            return start, stop
    raise ValueError(f"the header's entry of {name!r} cannot be: {str(one)[:99]}")


def _are_lengths(value: Any) -> TypeGuard[list[int]]:
    if not isinstance(value, list) or len(value) > _MOST_DIMS:
        return False
    return all(type(one) is int and 0 <= one < 2**63 for one in value)


class SafetensorsWriter:
    """One safetensors file, written tensor by tensor in a fixed order.

    Args:
        path: The file, which must not exist.
        wholes: Its tensors, in the order in which they come. In the file wider ones lie before
            others, so that all are aligned.
        metadata: Strings for the header.
    """

    def __init__(
        self, path: Path, wholes: Sequence[Whole], *, metadata: dict[str, str] | None = None
    ) -> None:
        self._waiting = list(wholes)[::-1]
        widest_first = sorted(wholes, key=lambda whole: -whole.dtype.itemsize)
        header, self._offsets, _ = layout(widest_first, metadata)
        self._offset = self._left = 0
        self._file = disk.create(path)
        self._write(memoryview(header))
        self._begin()

    @property
    def is_complete(self) -> bool:
        """Whether all values have come."""
        return not self._waiting

    def write(self, name: str, values: Tensor) -> None:
        """Write the next values of the next tensor, in order; they lie on the CPU, in any shape.

        An empty tensor takes one call as well.
        """
        data, whole = as_bytes(values).numpy().data, self._waiting[-1]
        assert (name, values.dtype) == (whole.name, whole.dtype) and data.nbytes <= self._left
        self._write(data)
        self._left -= data.nbytes
        if not self._left:
            self._waiting.pop()
            self._begin()

    def finish(self) -> None:
        """Sync and close the file."""
        assert not self._waiting
        disk.sync(self._file)
        self.close()

    def close(self) -> None:
        """Close the file, whole or not."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _begin(self) -> None:
        if self._waiting:
            self._left = self._waiting[-1].nbytes
            self._offset = self._offsets[self._waiting[-1].name]

    def _write(self, data: memoryview) -> None:
        disk.write(self._file, [data], self._offset)
        if data.nbytes:
            disk.begin_sync(self._file, self._offset, data.nbytes)
        self._offset += data.nbytes
