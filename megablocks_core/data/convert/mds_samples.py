"""The bytes of an MDS shard: how many samples, where each begins, and the columns of each.

All numbers are little-endian. A shard is uint32 ``n``, uint32 offsets [n + 1] of samples in the
file, JSON that says what the columns are, and the samples. A sample is the uint32 size of each
column that has no fixed one, and the columns. Source:
https://github.com/mosaicml/streaming (``streaming/base/format/mds``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

# How the first byte of an array of unknown dtype says which it is.
_DTYPES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}
ARRAY_DTYPES = tuple(_DTYPES.values())
_MOST = 1 << 32  # bytes that an offset reaches


class Damaged(Exception):
    """Why a shard cannot be read."""


def columns(shard: memoryview, samples: int, sizes: Sequence[int | None], at: int) -> Iterator[Any]:
    """The bytes of one column in each sample.

    Args:
        shard: All its bytes.
        samples: That it must have.
        sizes: Of the columns, where they are fixed.
        at: The number of the column.

    Raises:
        Damaged: It has another number of samples, or one lies outside it.
    """
    fixed = np.array([size or 0 for size in sizes], np.int64)
    variable = fixed == 0
    head = 4 * int(variable.sum())
    if len(shard) < 4 or int(np.frombuffer(shard[:4], "<u4")[0]) != samples:
        raise Damaged(f"does not begin with {samples}, the number of its samples")
    if len(shard) < 8 + 4 * samples:
        raise Damaged("is cut short")
    offsets = np.frombuffer(shard[4 : 8 + 4 * samples], "<u4").tolist()
    for begin, end in zip(offsets, offsets[1:], strict=False):
        if not 8 + 4 * samples <= begin <= end <= len(shard) or end - begin < head:
            raise Damaged(f"has a sample from byte {begin} to {end}, of {len(shard)}")
        lengths = fixed.copy()
        lengths[variable] = np.frombuffer(shard[begin : begin + head], "<u4")
        start = begin + head + int(lengths[:at].sum())
        if begin + head + int(lengths.sum()) != end:
            raise Damaged(f"has a sample of {end - begin} bytes with columns of {lengths.tolist()}")
        yield shard[start : start + int(lengths[at])]


def array_of(data: memoryview, encoding: str) -> np.ndarray:
    """The array [T] that a column holds, whose encoding is ``ndarray``, ``:DTYPE`` or ``:SHAPE``.

    Raises:
        Damaged: It is none, or has several dimensions.
    """
    _, *given = encoding.split(":")
    try:
        name = given[0] if given else _DTYPES[data[0]]
        data = data if given else data[1:]
        if len(given) < 2:
            dimensions, width = data[0] >> 2, 1 << (data[0] & 3)
            end = 1 + dimensions * width
            shape = np.frombuffer(data[1:end], f"<u{width}").astype(np.int64).tolist()
            data = data[end:]
        else:
            shape = [int(size) for size in given[1].split(",")]
        array = np.frombuffer(data, np.dtype(name).newbyteorder("<"))
    except (IndexError, KeyError, ValueError, TypeError):
        raise Damaged(f"has a sample that is no {encoding}") from None
    if shape != [len(array)]:
        raise Damaged(f"has an array of shape {shape}, must be one row of {len(array)}")
    return array


def sample_of(tokens: np.ndarray) -> bytes:
    """A sample of one column, whose encoding is ``ndarray:DTYPE``."""
    width = next(w for w in range(4) if len(tokens) < 1 << (8 << w))
    shape = bytes([1 << 2 | width]) + len(tokens).to_bytes(1 << width, "little")
    array = shape + tokens.tobytes()
    if len(array) >= _MOST:
        raise ValueError(f"a document of {len(tokens)} tokens must have below 4 GiB")
    return len(array).to_bytes(4, "little") + array


def shard_of(samples: Sequence[bytes], described: bytes) -> bytes:
    """A shard of samples, with the JSON that describes their columns."""
    offsets = np.cumsum([0, *map(len, samples)]) + 8 + 4 * len(samples) + len(described)
    if offsets[-1] >= _MOST:
        raise ValueError(f"a shard of {offsets[-1]} bytes must have below 4 GiB")
    head = len(samples).to_bytes(4, "little") + offsets.astype("<u4").tobytes()
    return b"".join([head, described, *samples])
