"""A tensor that ``torch.save`` wrote somewhere in a file: where its bytes lie, read at need.

``torch.save`` writes a zip archive, uncompressed: a pickle that says dtype, shape and strides,
and the bytes of the storage as they are.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from math import prod
from reprlib import repr as short
from typing import Any, NamedTuple

import torch

from megablocks_core.ckpt.manifest import CheckpointError
from megablocks_core.ckpt.places.places import Source
from megablocks_core.ckpt.tools.safe_pickle import load_pickle

_LONGEST_PICKLE = 2**20
_STORAGES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
}


class SavedTensor(NamedTuple):
    """A tensor in a file.

    Attributes:
        dtype: Its own.
        shape: Its own.
        strides: In elements.
        first: Its first element in the storage.
        offset: Where the storage begins in the file.
        nbytes: Of the storage.
        crc: CRC-32 of the storage, or ``None`` where it was not computed.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    first: int
    offset: int
    nbytes: int
    crc: int | None

    @property
    def is_plain(self) -> bool:
        """Whether the storage is the tensor, row-major."""
        dense = tuple(prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))
        sizes = zip(self.strides, dense, self.shape, strict=True)
        same = all(one == other or size == 1 for one, other, size in sizes)
        return same and self.nbytes == prod(self.shape) * self.dtype.itemsize


class Window(io.RawIOBase):
    """Bytes [offset, offset + length) of a source, as a file."""

    def __init__(self, source: Source, offset: int, length: int) -> None:
        self._source, self._offset, self._length = source, offset, length
        self._at = 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a byte."""
        base = (0, self._at, self._length)[whence]
        if base + offset < 0:
            raise ValueError(f"byte {base + offset} is before the start")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        """The byte where it is."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with what follows."""
        part = memoryview(buffer).cast("B")[: max(self._length - self._at, 0)]
        if part.nbytes:
            self._source.read([part], self._offset + self._at)
        self._at += part.nbytes
        return part.nbytes


def find_tensor(source: Source, offset: int, length: int, what: str) -> SavedTensor:
    """The tensor in bytes [offset, offset + length) of a file; its values are not read.

    Raises:
        CheckpointError: There is no tensor there, or one that is not wholly there.
    """
    try:
        with zipfile.ZipFile(io.BufferedReader(Window(source, offset, length))) as archive:
            return _tensor(source, archive, offset, length, what)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError, struct.error) as error:
        raise CheckpointError(f"{what} is damaged: {error}") from error


def check_object(data: bytes | bytearray, what: str) -> None:
    """Check, before ``torch.load`` has it, that an object in an archive unpacks to no more.

    Raises:
        CheckpointError: It is no archive, or what is in it is compressed.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError, struct.error) as error:
        raise CheckpointError(f"{what} is damaged: {error}") from error
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > len(data):
            raise CheckpointError(f"{what} is compressed, which torch.save never does")


def _tensor(
    source: Source, archive: zipfile.ZipFile, offset: int, length: int, what: str
) -> SavedTensor:
    entries = {one.filename.partition("/")[2]: one for one in archive.infolist()}
    head = entries.get("data.pkl")
    if head is None or head.file_size > _LONGEST_PICKLE:
        raise CheckpointError(f"{what} is no tensor")
    start = _start(source, head, offset, length, what)
    pickled = _read(source, start, head.file_size)
    parts = load_pickle(pickled, what, _NAMES, load_storage=lambda pid: pid)
    if not isinstance(parts, _Parts):
        raise CheckpointError(f"{what} is no tensor but a {type(parts).__name__}")
    key, dtype = parts.storage()
    order = entries.get("byteorder")
    if order is not None:
        where = _start(source, order, offset, length, what)
        if _read(source, where, min(order.file_size, 16)) != b"little":
            raise CheckpointError(f"{what} has its bytes in big-endian order")
    entry = entries.get(f"data/{key}")
    if entry is None:
        raise CheckpointError(f"{what} is damaged: storage {key!r} is missing")
    _check_inside(parts, dtype, entry.file_size, what)
    return SavedTensor(
        dtype,
        parts.shape,
        parts.strides,
        parts.first,
        _start(source, entry, offset, length, what),
        entry.file_size,
        # With torch.serialization.set_crc32_options(False) none of an archive's is right.
        entry.CRC if zlib.crc32(pickled) == head.CRC else None,
    )


def _start(source: Source, entry: zipfile.ZipInfo, offset: int, length: int, what: str) -> int:
    """Where the bytes of an entry begin in the file."""
    if entry.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(f"{what} is compressed, which torch.save never does")
    if not 0 <= entry.header_offset <= length - 30:
        raise CheckpointError(f"{what} is damaged: {entry.filename!r} is not where it should be")
    header = _read(source, offset + entry.header_offset, 30)
    names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    start = entry.header_offset + 30 + names
    if header[:4] != b"PK\x03\x04" or start + entry.file_size > length:
        raise CheckpointError(f"{what} is damaged: {entry.filename!r} is not where it should be")
    return offset + start


def _read(source: Source, start: int, length: int) -> bytes:
    memory = bytearray(length)
    source.read([memoryview(memory)], start)
    return bytes(memory)


class _Parts:
    """Stands for the call that makes a tensor: ``torch._utils._rebuild_tensor_v2`` or ``_v3``."""

    def __init__(self, storage: Any, first: Any, shape: Any, strides: Any, *rest: Any) -> None:
        numbers = (first, *shape, *strides)
        if not all(type(one) is int and 0 <= one < 2**63 for one in numbers):
            raise ValueError(f"a tensor has the sizes {short(numbers)}")
        self.first, self.shape, self.strides = first, tuple(shape), tuple(strides)
        self._storage, self._rest = storage, rest

    def storage(self) -> tuple[str, torch.dtype]:
        """The storage's name in the archive, and the tensor's dtype."""
        if not isinstance(self._storage, tuple) or len(self._storage) != 5:
            raise ValueError("a tensor has no storage")
        _, kind, key, _, _ = self._storage
        dtype = kind if isinstance(kind, torch.dtype) else self._rest[2:3]
        dtype = dtype[0] if isinstance(dtype, tuple) and dtype else dtype
        if not isinstance(dtype, torch.dtype) or not isinstance(key, str):
            raise ValueError(f"a tensor has the dtype {short(dtype)}, the storage {short(key)}")
        return key, dtype


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _hooks(*_: Any) -> None:
    """Stands for the hooks of a tensor, of which a saved one has none."""


_NAMES = {
    ("torch._utils", "_rebuild_tensor_v2"): _Parts,
    ("torch._utils", "_rebuild_tensor_v3"): _Parts,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch.storage", "UntypedStorage"): None,
    ("collections", "OrderedDict"): _hooks,
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
}


def _check_inside(parts: _Parts, dtype: torch.dtype, nbytes: int, what: str) -> None:
    """Every element lies in the storage, and none is there twice: a byte makes no terabyte."""
    if len(parts.shape) != len(parts.strides):
        raise CheckpointError(
            f"{what} has the shape {short(parts.shape)}, strides {short(parts.strides)}"
        )
    if 0 in parts.shape:
        return
    sizes = zip(parts.shape, parts.strides, strict=True)
    last = parts.first + sum((size - 1) * step for size, step in sizes)
    longest = max(last + 1, prod(parts.shape)) * dtype.itemsize
    if longest > nbytes or nbytes % dtype.itemsize:
        raise CheckpointError(f"{what} is longer than its storage of {nbytes} bytes")
