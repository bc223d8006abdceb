"""A folder of safetensors files that appears whole under its name, or not at all.

One rank writes; nothing here communicates. Files are written aside and synced, the folder is
renamed, and the folder above is synced, so that after a crash at any point the name stands
for all of it or for nothing.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megablocks_core.groups.collect import Whole

# safetensors' names of dtypes.
CODES = {
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


class NewFolder:
    """A folder in the making, beside its target.

    Args:
        target: Where it will appear; missing folders above are made.

    Attributes:
        staging: Where its files are written until then.

    Raises:
        ValueError: ``target`` exists and is not an empty folder.
    """

    def __init__(self, target: Path) -> None:
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise ValueError(f"path={str(target)!r} must be new or an empty folder")
        self.target = target
        self.staging = target.parent / f".{target.name}.{secrets.token_hex(4)}.partial"
        make_folder(target.parent)
        self.staging.mkdir()

    def publish(self) -> None:
        """Sync the folder and rename it to its target, which is refused if no longer empty."""
        sync_folder(self.staging)
        self.staging.rename(self.target)
        sync_folder(self.target.parent)

    def withdraw(self) -> None:
        """Take back a folder that was published, because what had to follow failed."""
        if not self.staging.exists():
            self.target.rename(self.staging)

    def discard(self) -> None:
        """Delete what was written so far; a published folder stays."""
        shutil.rmtree(self.staging, ignore_errors=True)


class SafetensorsWriter:
    """One safetensors file, written tensor by tensor in a fixed order.

    Args:
        path: The file, which must not exist.
        wholes: Its tensors, in order, widest dtype first.
        metadata: Strings for the header.
        observe: Called with each run of bytes, in order, as it is written.

    Attributes:
        offsets: For each tensor, where its bytes begin in the file.
    """

    def __init__(
        self,
        path: Path,
        wholes: Sequence[Whole],
        *,
        metadata: dict[str, str] | None = None,
        observe: Callable[[memoryview], None] = lambda _: None,
    ) -> None:
        header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
        starts, end = {}, 0
        for whole in wholes:
            starts[whole.name], start, end = end, end, end + whole.nbytes
            header[whole.name] = {
                "dtype": CODES[whole.dtype],
                "shape": list(whole.shape),
                "data_offsets": [start, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.offsets = {name: 8 + len(text) + start for name, start in starts.items()}
        self._waiting = list(wholes)[::-1]
        self._observe = observe
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115
        self._write(memoryview(len(text).to_bytes(8, "little") + text))

    def add(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor, which must be the next of ``wholes`` and lie on the CPU."""
        assert Whole(name, tuple(tensor.shape), tensor.dtype) == self._waiting.pop()
        if tensor.numel():
            self._write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def finish(self) -> None:
        """Sync and close the file."""
        assert not self._waiting
        os.fsync(self._file.fileno())
        self.close()

    def close(self) -> None:
        """Close the file, whole or not."""
        self._file.close()

    def _write(self, data: memoryview) -> None:
        self._observe(data)
        while data:
            data = data[self._file.write(data) :]


def write_file(path: Path, data: bytes) -> None:
    """Write a small new file and sync it."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def make_folder(path: Path) -> None:
    """Make a folder, and those above that are missing, and sync the names."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
