"""The indexed dataset: token sequences in a ``.bin`` file, their places in an ``.idx`` file.

The format of Megatron-LM, which most of the field reads and writes; docs/indexed-format.md
has it byte by byte. Dimensions: S sequences, D documents (a document is a run of sequences).
"""

import mmap
import os
import struct
from bisect import bisect_left
from typing import NoReturn, overload

import numpy as np

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

# An index with more entries than this is checked at both ends only when it is opened, so that
# a hundred million documents open at once; `verify` checks every entry of any index.
CHECKED_ON_OPEN = 1 << 20


class IndexedDataset:
    """Read-only, memory-mapped token sequences ``prefix.bin`` with their index ``prefix.idx``.

    ``dataset[i]`` is sequence ``i`` and ``dataset[a:b]`` a list of them, each a view of the
    mapped file: nothing is copied. The token dtype is the one in the header, always. Pickles
    as its prefix.

    Shapes: ``tokens`` [num_tokens] all sequences end to end; ``sequence_lengths`` [S] int32;
    ``sequence_pointers`` [S] int64, the byte at which each sequence begins;
    ``document_indices`` [D + 1] int64, the sequence at which each document begins, ending
    with S; ``sequence_modes`` [S] int8 or ``None`` where the file has none.

    Sends nothing; every rank opens the files for itself.

    Raises:
        ValueError: the files are damaged or do not belong together; names the file, what it
            says and what it must say.

    Source: the ``.idx``/``.bin`` format of https://github.com/NVIDIA/Megatron-LM.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        self.index_path = self.prefix + ".idx"
        self.token_path = self.prefix + ".bin"
        index, tokens = _map(self.index_path), _map(self.token_path)
        self.dtype, num_sequences, num_indices = _read_header(index, self.index_path)

        sizes = (4 * num_sequences, 8 * num_sequences, 8 * num_indices, num_sequences)
        *ends, plain, with_modes = _cumulative(HEADER.size, sizes)
        if len(index) not in (plain, with_modes):
            raise ValueError(
                f"{self.index_path}: holds {len(index)} bytes, must hold {plain} for its "
                f"{num_sequences} sequences and {num_indices} document indices "
                f"({with_modes} with modes)"
            )
        self.sequence_lengths = index[ends[0] : ends[1]].view("<i4")
        self.sequence_pointers = index[ends[1] : ends[2]].view("<i8")
        self.document_indices = index[ends[2] : plain].view("<i8")
        self.sequence_modes = index[plain:].view("i1") if len(index) > plain else None

        self._check_ends(len(tokens))
        self.tokens = tokens.view(self.dtype)
        if num_sequences + num_indices <= CHECKED_ON_OPEN:
            self.verify()

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all sequences."""
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        """Number of documents D, empty ones included."""
        return len(self.document_indices) - 1

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, index: slice) -> list[np.ndarray]: ...
    def __getitem__(self, index: int | slice) -> np.ndarray | list[np.ndarray]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        start, stop = self._token_range(index)
        return self.tokens[start:stop]

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return ``length`` tokens of a sequence from ``offset`` on (by default all the rest)."""
        start, stop = self._token_range(index)
        rest = stop - start - offset
        length = rest if length is None else length
        if not 0 <= offset <= stop - start or not 0 <= length <= rest:
            raise ValueError(
                f"offset={offset}, length={length} must lie inside sequence {index} "
                f"of {stop - start} tokens"
            )
        return self.tokens[start + offset : start + offset + length]

    def document_start(self, document: int) -> int:
        """Return where a document begins in ``tokens``; document D begins where they end."""
        sequence = int(self.document_indices[document])
        if sequence == len(self):
            return self.num_tokens
        return int(self.sequence_pointers[sequence]) // self.dtype.itemsize

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """Return the places in ``tokens[start:stop]`` at which documents begin, each once.

        Found by binary search in the mapped index; empty documents begin nowhere of their own.
        """
        stop = min(stop, self.num_tokens)
        documents = range(self.num_documents)
        first = bisect_left(documents, start, key=self.document_start)
        last = bisect_left(documents, stop, first, key=self.document_start)
        pointers = self.sequence_pointers[self.document_indices[first:last]]
        return np.unique(pointers) // self.dtype.itemsize

    def verify(self) -> None:
        """Check every entry of the index against its neighbours; ``ValueError`` if one is wrong.

        Opening does the same, except for an index of more than a million entries. Works
        through the index in pieces, so memory stays small.
        """
        itemsize, piece = self.dtype.itemsize, CHECKED_ON_OPEN
        for first in range(0, len(self), piece):
            lengths = self.sequence_lengths[first : first + piece].astype(np.int64)
            begins = self.sequence_pointers[first : first + piece + 1]
            ends = begins[: len(lengths)] + lengths * itemsize
            if (wrong := _first(lengths < 0)) is not None:
                self._refuse(f"sequence {first + wrong} has {lengths[wrong]} tokens, must have 0+")
            if (wrong := _first(ends[: len(begins) - 1] != begins[1:])) is not None:
                self._refuse(
                    f"sequence {first + wrong + 1} begins at byte {begins[wrong + 1]}, must begin "
                    f"at byte {ends[wrong]}, where sequence {first + wrong} ends"
                )
        for first in range(0, self.num_documents, piece):
            indices = self.document_indices[first : first + piece + 1]
            if (wrong := _first(indices[1:] < indices[:-1])) is not None:
                self._refuse(
                    f"document {first + wrong} ends at sequence {indices[wrong + 1]}, must not "
                    f"end before sequence {indices[wrong]}, where it begins"
                )

    def _check_ends(self, num_bytes: int) -> None:
        """Check what costs the same for any number of sequences."""
        begins, ends = 0, 0
        if len(self):
            begins = int(self.sequence_pointers[0])
            ends = (
                int(self.sequence_pointers[-1])
                + int(self.sequence_lengths[-1]) * self.dtype.itemsize
            )
        if begins != 0:
            self._refuse(f"sequence 0 begins at byte {begins}, must begin at byte 0")
        if ends != num_bytes:
            raise ValueError(
                f"{self.token_path}: holds {num_bytes} bytes, must hold {ends} for the "
                f"{len(self)} sequences of {self.dtype.name} that {self.index_path} lists"
            )
        if not len(self.document_indices):
            self._refuse("has 0 document indices, must have at least 1")
        if (first := int(self.document_indices[0])) != 0:
            self._refuse(f"document 0 begins at sequence {first}, must begin at sequence 0")
        if (last := int(self.document_indices[-1])) != len(self):
            self._refuse(f"documents end at sequence {last}, must end at sequence {len(self)}")

    def _token_range(self, index: int) -> tuple[int, int]:
        """Return where a sequence lies in ``tokens``, checked against the one that follows."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        index %= len(self)
        itemsize = self.dtype.itemsize
        start, length = int(self.sequence_pointers[index]), int(self.sequence_lengths[index])
        stop = start + length * itemsize
        follows = index + 1 < len(self)
        must = int(self.sequence_pointers[index + 1]) if follows else self.tokens.nbytes
        if length < 0 or stop != must or start % itemsize or not 0 <= start <= self.tokens.nbytes:
            self._refuse(
                f"sequence {index} takes bytes {start} to {stop}, must take whole tokens "
                f"and end at byte {must}"
            )
        return start // itemsize, stop // itemsize

    def _refuse(self, fault: str) -> NoReturn:
        raise ValueError(f"{self.index_path}: {fault}")

    def __reduce__(self) -> tuple[type["IndexedDataset"], tuple[str]]:
        return type(self), (self.prefix,)


def _map(path: str) -> np.ndarray:
    """Map a file as read-only bytes."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:  # cannot be mapped
            return np.frombuffer(b"", np.uint8)
        return np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), np.uint8)


def _read_header(index: np.ndarray, path: str) -> tuple[np.dtype, int, int]:
    """Return the token dtype, the number of sequences and the number of document indices."""
    if len(index) < HEADER.size:
        raise ValueError(f"{path}: holds {len(index)} bytes, its header alone takes {HEADER.size}")
    magic, version, code, num_sequences, num_indices = HEADER.unpack(index[: HEADER.size].tobytes())
    if magic != MAGIC:
        raise ValueError(f"{path}: begins with {magic!r}, must begin with {MAGIC!r}")
    if version != VERSION:
        raise ValueError(f"{path}: version {version} must be {VERSION}")
    if code not in DTYPES:
        raise ValueError(f"{path}: dtype code {code} must be one of {sorted(DTYPES)}")
    return DTYPES[code], num_sequences, num_indices


def _cumulative(start: int, sizes: tuple[int, ...]) -> list[int]:
    ends = [start]
    for size in sizes:
        ends.append(ends[-1] + size)
    return ends


def _first(wrong: np.ndarray) -> int | None:
    """Return the place of the first true entry."""
    return int(wrong.argmax()) if wrong.any() else None
