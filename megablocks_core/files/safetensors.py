"""Write a safetensors file tensor by tensor, holding no more than one of them.

The format: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

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


class SafetensorsWriter:
    """One safetensors file, written tensor by tensor in a fixed order.

    Args:
        path: The file, which must not exist.
        wholes: Its tensors, in order, widest dtype first.
        metadata: Strings for the header.
    """

    def __init__(
        self, path: Path, wholes: Sequence[Whole], *, metadata: dict[str, str] | None = None
    ) -> None:
        self._waiting = list(wholes)[::-1]
        self._offset = 0
        self._file = disk.create(path)
        self._write(memoryview(layout(wholes, metadata).header))

    def add(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor, which must be the next of ``wholes`` and lie on the CPU."""
        assert Whole(name, tuple(tensor.shape), tensor.dtype) == self._waiting.pop()
        self._write(as_bytes(tensor).numpy().data)

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

    def _write(self, data: memoryview) -> None:
        disk.write(self._file, [data], self._offset)
        self._offset += data.nbytes
