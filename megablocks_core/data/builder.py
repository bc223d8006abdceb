"""Writes indexed datasets; what a reader sees is whole or not there."""

import os
import secrets
import weakref
from array import array
from collections.abc import Sequence
from operator import index
from types import TracebackType
from typing import BinaryIO

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from megablocks_core.data.indexed import DTYPES, HEADER, MAGIC, VERSION, IndexedDataset
from megablocks_core.files import sync_file, sync_folder

CODES = {dtype: code for code, dtype in DTYPES.items()}
LONGEST_SEQUENCE = 2**31 - 1  # lengths are int32 in the file
PIECE = 1 << 22  # tokens converted at a time


def smallest_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest dtype of the format that holds the ids 0 to ``vocab_size - 1``."""
    for dtype in map(np.dtype, ("u1", "<u2", "<i4", "<i8")):
        if 1 <= vocab_size <= np.iinfo(dtype).max + 1:
            return dtype
    raise ValueError(f"vocab_size={vocab_size} must be between 1 and 2**63")


class IndexedDatasetBuilder:
    """Writes ``prefix.bin`` and ``prefix.idx``, byte for byte as Megatron-LM does.

    Tokens are written aside as they come. ``finish`` syncs both files to disk and renames
    them into place, the index last: before that nothing stands under ``prefix``, after it the
    whole dataset does. Used as a context manager, it finishes at the end of the block, and an
    exception publishes nothing and removes what was written. ::

        with IndexedDatasetBuilder("corpus", dtype=np.uint16) as builder:
            builder.add_document([5, 3, 9])

    With ``overwrite=True`` it replaces a dataset; a crash between the two renames then leaves
    no dataset, never the tokens of one with the index of the other. Two builders that
    overwrite one prefix at the same time are not served.

    Shapes: ``tokens`` [any number], integers; a sequence has at most 2**31 - 1 of them.

    Sends nothing.

    Raises:
        FileExistsError: a dataset, or half of one, stands under ``prefix``.
        ValueError: a token id does not fit ``dtype`` (ids never wrap), lengths do not sum to
            the tokens, or sequences belong to no document. The builder is as it was before
            that call and can go on.

    Source: the ``.idx``/``.bin`` format of https://github.com/NVIDIA/Megatron-LM.
    """

    def __init__(
        self, prefix: str | os.PathLike[str], dtype: DTypeLike, *, overwrite: bool = False
    ) -> None:
        self.prefix = os.fspath(prefix)
        self.overwrite = overwrite
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in CODES:
            names = ", ".join(dtype.name for dtype in CODES)
            raise ValueError(f"dtype={self.dtype.name} must be one of {names}")
        self._refuse_existing()
        self._lengths = array("i")
        self._document_indices = array("q", [0])
        self._aside = f"{self.prefix}.{secrets.token_hex(4)}.tmp"
        self._tokens = open(self._aside + ".bin", "xb", buffering=1 << 20)  # noqa: SIM115
        self._discard = weakref.finalize(self, _remove, self._tokens, self._aside)

    def add_item(self, tokens: ArrayLike) -> None:
        """Add one sequence to the open document."""
        fitting = self._fitting(tokens)
        self._append(fitting, [len(fitting)])

    def end_document(self) -> None:
        """Close the document of all sequences added since the last one was closed."""
        self._document_indices.append(len(self._lengths))

    def add_document(self, tokens: ArrayLike, lengths: Sequence[int] | None = None) -> None:
        """Add a document of one sequence, or cut into sequences of ``lengths``, and close it."""
        fitting = self._fitting(tokens)
        lengths = [len(fitting)] if lengths is None else [index(length) for length in lengths]
        if min(lengths, default=0) < 0 or sum(lengths) != len(fitting):
            raise ValueError(
                f"lengths of sum {sum(lengths)} must be 0 or more each and sum to the "
                f"{len(fitting)} tokens given"
            )
        self._append(fitting, lengths)
        self.end_document()

    def add_index(self, prefix: str | os.PathLike[str]) -> None:
        """Add all sequences and documents of another dataset, whose every entry is checked.

        Ids are copied by value: one of another dtype is converted, or refused if it does not
        fit.
        """
        other = IndexedDataset(prefix)
        other.verify()
        if other.sequence_modes is not None:
            raise ValueError(f"{other.index_path}: has modes, which this builder does not write")
        if self._open_sequences:
            raise ValueError(
                f"{self._open_sequences} sequences must be closed by end_document() "
                f"before add_index({other.prefix!r})"
            )
        before = len(self._lengths)
        self._append(self._fitting(other.tokens), other.sequence_lengths)
        ends = other.document_indices[1:] + before
        self._document_indices.frombytes(ends.astype(np.int64).tobytes())

    def finish(self) -> None:
        """Publish the dataset; the builder takes nothing after it."""
        self._refuse_closed()
        if self._open_sequences:
            raise ValueError(
                f"{self._open_sequences} sequences must be closed by end_document() before finish()"
            )
        try:
            sync_file(self._tokens)
            with open(self._aside + ".idx", "xb") as file:
                self._write_index(file)
                sync_file(file)
            self._publish()
        finally:
            self._discard()

    def discard(self) -> None:
        """Remove what was written aside; nothing is published."""
        self._discard()

    def __enter__(self) -> "IndexedDatasetBuilder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None and self._discard.alive:
                self.finish()
        finally:
            self.discard()

    @property
    def _open_sequences(self) -> int:
        return len(self._lengths) - self._document_indices[-1]

    def _fitting(self, tokens: ArrayLike) -> np.ndarray:
        """Return the tokens as an array whose values all fit the dtype of the dataset."""
        given = np.asarray(tokens)
        if given.ndim != 1:
            raise ValueError(f"tokens of shape {given.shape} must have one dimension")
        if given.size == 0 or np.can_cast(given.dtype, self.dtype, "safe"):
            return given
        if given.dtype.kind not in "iu" or self.dtype.kind not in "iu":
            raise ValueError(
                f"tokens of {given.dtype} must have a dtype that converts exactly to "
                f"{self.dtype.name}"
            )
        limits = np.iinfo(self.dtype.name)
        for token in (int(given.min()), int(given.max())):
            if not limits.min <= token <= limits.max:
                raise ValueError(
                    f"token id {token} (given as {given.dtype}) must be between {limits.min} "
                    f"and {limits.max} to be stored as {self.dtype.name}"
                )
        return given

    def _append(self, tokens: np.ndarray, lengths: Sequence[int] | np.ndarray) -> None:
        """Write tokens that fit and note their lengths, or discard everything."""
        self._refuse_closed()
        if (longest := np.max(lengths, initial=0)) > LONGEST_SEQUENCE:
            raise ValueError(f"a sequence of {longest} tokens must have at most {LONGEST_SEQUENCE}")
        try:
            for first in range(0, len(tokens), PIECE):
                piece = tokens[first : first + PIECE]
                self._tokens.write(np.ascontiguousarray(piece, self.dtype).data)
        except BaseException:  # part of the bytes may be in the file: later tokens would shift
            self._discard()
            raise
        self._lengths.frombytes(np.asarray(lengths, np.intc).tobytes())

    def _write_index(self, file: BinaryIO) -> None:
        lengths = np.frombuffer(self._lengths, np.intc)
        documents = np.frombuffer(self._document_indices, np.int64)
        code = CODES[self.dtype]
        file.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(documents)))
        file.write(lengths.astype("<i4").data)
        file.write(pointers(lengths, self.dtype.itemsize).astype("<i8").data)
        file.write(documents.astype("<i8").data)

    def _publish(self) -> None:
        """Rename both files into place, the index last."""
        self._refuse_existing()
        index_path, token_path = self.prefix + ".idx", self.prefix + ".bin"
        folder = os.path.dirname(self.prefix) or "."
        if self.overwrite:
            for path in (index_path, token_path):
                if os.path.exists(path):
                    os.remove(path)
                    sync_folder(folder)
        with open(token_path, "xb"):  # claims the name: of two builders one fails here
            pass
        try:
            os.replace(self._aside + ".bin", token_path)
            sync_folder(folder)
            os.replace(self._aside + ".idx", index_path)
        except BaseException:
            os.remove(token_path)
            raise
        sync_folder(folder)

    def _refuse_existing(self) -> None:
        for path in (self.prefix + ".idx", self.prefix + ".bin"):
            if os.path.exists(path) and not self.overwrite:
                raise FileExistsError(f"{path} exists; overwrite=True replaces the dataset")

    def _refuse_closed(self) -> None:
        if not self._discard.alive:
            raise ValueError(f"the builder of {self.prefix} is finished or discarded")


def pointers(lengths: np.ndarray, itemsize: int) -> np.ndarray:
    """Return the byte at which each sequence begins, [S] int64."""
    ends = np.cumsum(lengths, dtype=np.int64) * itemsize
    return np.concatenate(([0], ends[:-1])) if len(ends) else ends


def _remove(tokens: BinaryIO, aside: str) -> None:
    """Close and remove what a builder wrote aside."""
    try:
        tokens.close()
    finally:
        for path in (aside + ".bin", aside + ".idx"):
            if os.path.exists(path):
                os.remove(path)
