"""The bytes of an ``.idx`` file: its header, where its arrays lie, and what must hold among them.

docs/indexed-format.md has the format byte by byte. Dimensions: S sequences, D documents.
"""

import struct
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import DTypeLike

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, S, D + 1
DTYPES = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}

# An index with more entries than this is checked at both ends only when it is opened, so that
# a hundred million documents open at once; it is also how many entries are checked at a time.
CHECKED_ON_OPEN = 1 << 20


class Writable(Protocol):
    """What bytes are written to."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Append bytes."""


class Layout(NamedTuple):
    """What the header of an index says, and the bytes at which its arrays begin and end."""

    dtype: np.dtype
    num_sequences: int
    num_indices: int
    lengths: tuple[int, int]
    pointers: tuple[int, int]
    documents: tuple[int, int]
    modes: tuple[int, int] | None


def token_dtype(dtype: DTypeLike) -> np.dtype:
    """Return a dtype of the format; ``None`` is none, though NumPy takes it for float64."""
    with suppress(TypeError):
        found = np.dtype(dtype).newbyteorder("<")
        if dtype is not None and found in CODES:
            return found
    names = ", ".join(known.name for known in CODES)
    raise ValueError(f"dtype={dtype!r} must be one of {names}")


def read_layout(header: bytes, size: int, path: str) -> Layout:
    """Read the first bytes of an index of ``size`` bytes; modes are told by the size alone.

    Raises:
        ValueError: it is no index, or its counts ask for another size.
    """
    if len(header) < HEADER.size:
        raise ValueError(f"{path}: holds {size} bytes, its header alone takes {HEADER.size}")
    magic, version, code, num_sequences, num_indices = HEADER.unpack(header)
    if magic != MAGIC:
        raise ValueError(f"{path}: begins with {magic!r}, must begin with {MAGIC!r}")
    if version != VERSION:
        raise ValueError(f"{path}: version {version} must be {VERSION}")
    if code not in DTYPES:
        raise ValueError(f"{path}: dtype code {code} must be one of {sorted(DTYPES)}")
    ends = [HEADER.size]
    for length in (4 * num_sequences, 8 * num_sequences, 8 * num_indices, num_sequences):
        ends.append(ends[-1] + length)
    if size not in ends[3:]:
        raise ValueError(
            f"{path}: holds {size} bytes, must hold {ends[3]} for its {num_sequences} sequences "
            f"and {num_indices} document indices ({ends[4]} with modes)"
        )
    lengths, pointers, documents, modes = zip(ends[:-1], ends[1:], strict=True)
    has_modes = size > ends[3]
    return Layout(
        DTYPES[code],
        num_sequences,
        num_indices,
        lengths,
        pointers,
        documents,
        modes if has_modes else None,
    )


def write_index(
    file: Writable,
    dtype: np.dtype,
    lengths: np.ndarray,
    documents: np.ndarray,
    modes: np.ndarray | None,
) -> None:
    """Write an index: lengths [S], document indices [D + 1], and modes [S] if there are any."""
    file.write(HEADER.pack(MAGIC, VERSION, CODES[dtype], len(lengths), len(documents)))
    file.write(lengths.astype("<i4").data)
    file.write(pointers(lengths, dtype.itemsize).astype("<i8").data)
    file.write(documents.astype("<i8").data)
    if modes is not None:
        file.write(modes.astype("i1").data)


def pointers(lengths: np.ndarray, itemsize: int) -> np.ndarray:
    """Return the byte at which each sequence begins, [S] int64."""
    ends = np.cumsum(lengths, dtype=np.int64) * itemsize
    return np.concatenate(([0], ends[:-1])) if len(ends) else ends


def fault_at_the_ends(dataset: Any, num_bytes: int) -> str | None:
    """Return what is wrong at the ends of an index, which costs the same for any size.

    ``dataset`` has the arrays and the dtype of an ``IndexedDataset``; ``num_bytes`` is the size
    of its token file.
    """
    lengths, begins, documents = _arrays(dataset)
    if len(lengths):
        if (begin := int(begins[0])) != 0:
            return f"sequence 0 begins at byte {begin}, must begin at byte 0"
        end = int(begins[-1]) + int(lengths[-1]) * dataset.dtype.itemsize
    else:
        end = 0
    if end != num_bytes:
        return (
            f"lists {len(lengths)} sequences of {dataset.dtype.name}, for which the token file "
            f"must hold {end} bytes; {dataset.token_path} holds {num_bytes} bytes"
        )
    if not len(documents):
        return "has 0 document indices, must have at least 1"
    if (first := int(documents[0])) != 0:
        return f"document 0 begins at sequence {first}, must begin at sequence 0"
    if (last := int(documents[-1])) != len(lengths):
        return f"documents end at sequence {last}, must end at sequence {len(lengths)}"
    return None


def fault_inside(dataset: Any) -> str | None:
    """Return the first entry that does not fit its neighbour, a piece of the index at a time."""
    lengths, begins, documents = _arrays(dataset)
    piece, itemsize = CHECKED_ON_OPEN, dataset.dtype.itemsize
    for first in range(0, len(lengths), piece):
        some = lengths[first : first + piece].astype(np.int64)
        starts = begins[first : first + piece + 1]
        ends = starts[: len(some)] + some * itemsize
        if (wrong := _first(some < 0)) is not None:
            return f"sequence {first + wrong} has {some[wrong]} tokens, must have 0+"
        if (wrong := _first(ends[: len(starts) - 1] != starts[1:])) is not None:
            return (
                f"sequence {first + wrong + 1} begins at byte {starts[wrong + 1]}, must begin "
                f"at byte {ends[wrong]}, where sequence {first + wrong} ends"
            )
    for first in range(0, len(documents) - 1, piece):
        indices = documents[first : first + piece + 1]
        if (wrong := _first(indices[1:] < indices[:-1])) is not None:
            return (
                f"document {first + wrong} ends at sequence {indices[wrong + 1]}, must not "
                f"end before sequence {indices[wrong]}, where it begins"
            )
    return None


def _arrays(dataset: Any) -> tuple[Any, Any, Any]:
    return dataset.sequence_lengths, dataset.sequence_pointers, dataset.document_indices


def _first(wrong: np.ndarray) -> int | None:
    """Return the place of the first true entry."""
    return int(wrong.argmax()) if wrong.any() else None
