"""Read a checkpoint: every block is hashed before a byte of it is used."""

from __future__ import annotations

import os
from pathlib import Path
from types import EllipsisType

import torch
import xxhash
from torch import Tensor

from megablocks_core.ckpt.manifest import (
    BLOCK_BYTES,
    CheckpointError,
    FileRecord,
    Manifest,
    StoredAs,
    read_manifest,
)
from megablocks_core.files.safetensors import DTYPE_CODES

_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}


class Stored:
    """A checkpoint on disk, whose manifest, file sizes and file headers have been checked.

    Attributes:
        manifest: What it holds.
        tensors: Lazy tensors by "entry/name".

    Raises:
        CheckpointError: It is not whole, or not what was written.
    """

    def __init__(self, folder: Path) -> None:
        self.manifest = read_manifest(folder)
        check_sizes(folder, self.manifest)
        files = {name: _File(folder / name, record) for name, record in self.manifest.files.items()}
        for name, file in files.items():
            starts = [
                part.offset
                for tensor in self.manifest.tensors.values()
                for part in tensor.chunks
                if part.file == name
            ]
            file.read(0, min(starts, default=file.size))
        self.tensors = {
            name: StoredTensor(name, stored, files)
            for name, stored in self.manifest.tensors.items()
        }


class StoredTensor:
    """A whole tensor in a checkpoint, of which the asked slices are read when it is indexed."""

    def __init__(self, name: str, stored: StoredAs, files: dict[str, _File]) -> None:
        self.name, self.dtype = name, _DTYPES[stored.dtype]
        self._shape = tuple(stored.shape)
        (chunk,) = stored.chunks
        self._file, self._offset = files[chunk.file], chunk.offset

    def get_shape(self) -> list[int]:
        """Its whole shape, as safetensors' lazy slices give it."""
        return list(self._shape)

    def __getitem__(self, index: EllipsisType | tuple[slice, ...]) -> Tensor:
        """Read slices with step 1: the rows asked for of dimension 0, then cut to the rest."""
        shape = self._shape
        first, rest = slice(None), ()
        if isinstance(index, tuple) and index:
            first, rest = index[0], index[1:]
        rows = range(*first.indices(shape[0])) if shape else range(1)
        row_bytes = self.dtype.itemsize * torch.Size(shape[1:]).numel()
        raw = self._file.read(self._offset + rows.start * row_bytes, len(rows) * row_bytes)
        part = raw.view(self.dtype).view((len(rows), *shape[1:]) if shape else ())
        return part[(slice(None), *rest)] if rest else part


class _File:
    """One file, read in whole blocks; the last block is kept for the small tensors in it."""

    def __init__(self, path: Path, record: FileRecord) -> None:
        self.path, self.size = path, record.size
        self._hashes = record.xxh3_128
        self._kept: tuple[int, Tensor] | None = None

    def read(self, offset: int, length: int) -> Tensor:
        """Bytes [offset, offset + length) of the file.

        Raises:
            CheckpointError: A block is not what was written.
        """
        if length == 0:
            return torch.empty(0, dtype=torch.uint8)
        first, last = offset // BLOCK_BYTES, (offset + length - 1) // BLOCK_BYTES
        if first == last and self._kept is not None and self._kept[0] == first:
            data = self._kept[1]
        else:
            data = self._blocks(first, last)
            self._kept = (last, data[(last - first) * BLOCK_BYTES :].clone())
        start = offset - first * BLOCK_BYTES
        return data[start : start + length]

    def damaged_blocks(self) -> list[int]:
        """Every block that is not what was written."""
        return [index for index in range(len(self._hashes)) if not self._good(index, index + 1)]

    def _good(self, first: int, stop: int) -> bool:
        try:
            self._blocks(first, stop - 1)
        except CheckpointError:
            return False
        return True

    def _blocks(self, first: int, last: int) -> Tensor:
        start, stop = first * BLOCK_BYTES, min((last + 1) * BLOCK_BYTES, self.size)
        data = torch.empty(stop - start, dtype=torch.uint8)
        view = data.numpy().data
        with open(self.path, "rb", buffering=0) as file:
            file.seek(start)
            done = 0
            while done < len(view):
                count = file.readinto(view[done:])
                if not count:
                    raise CheckpointError(f"{self.path} ends before byte {stop}")
                done += count
        for index in range(first, last + 1):
            block = view[index * BLOCK_BYTES - start : (index + 1) * BLOCK_BYTES - start]
            if xxhash.xxh3_128_hexdigest(block) != self._hashes[index]:
                raise CheckpointError(
                    f"{self.path} is damaged: block {index} (from byte {index * BLOCK_BYTES}) "
                    "is not what was written"
                )
        return data


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Check that every file is there in full.

    Raises:
        CheckpointError: The files that are missing or of another size, with both sizes.
    """
    faults = []
    for name, record in manifest.files.items():
        path = folder / name
        if not path.is_file():
            faults.append(f"{path} is missing")
        elif path.stat().st_size != record.size:
            faults.append(f"{path} has {path.stat().st_size} bytes, {record.size} were written")
    if faults:
        raise CheckpointError("; ".join(faults))


def verify(path: str | os.PathLike[str]) -> None:
    """Read all of the checkpoint ``path`` and compare it with what was written.

    Raises:
        CheckpointError: What is wrong: files that are missing or cut short, or the damaged
            blocks and the tensors that lie in them.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)
    faults = []
    for name, record in manifest.files.items():
        for block in _File(folder / name, record).damaged_blocks():
            start, stop = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, record.size)
            held = [
                tensor
                for tensor, stored in manifest.tensors.items()
                for part in stored.chunks
                if part.file == name and part.offset < stop and start < part.offset + part.length
            ]
            faults.append(f"{folder / name} is damaged in bytes {start} to {stop}, in {held}")
    if faults:
        raise CheckpointError("; ".join(faults))
