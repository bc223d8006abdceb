"""Writes indexed datasets; what a reader sees is whole or not there."""

import os
from array import array
from collections.abc import Sequence
from types import TracebackType

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from megablocks_core.data.checks import prefix_of, row, whole_number
from megablocks_core.data.content import ContentHash, hash_documents
from megablocks_core.data.index_file import token_dtype, write_index
from megablocks_core.data.indexed import IndexedDataset
from megablocks_core.data.manifest import FileRecord, Manifest
from megablocks_core.data.publish import Staging

LONGEST_SEQUENCE = 2**31 - 1  # lengths are int32 in the file
PIECE = 1 << 22  # tokens converted at a time


def smallest_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest dtype of the format that holds the ids 0 to ``vocab_size - 1``."""
    size = whole_number("vocab_size", vocab_size, 1, 2**63)
    for dtype in map(np.dtype, ("u1", "<u2", "<i4", "<i8")):
        if size <= np.iinfo(dtype).max + 1:
            return dtype
    raise ValueError(f"vocab_size={size} must be at most 2**63")


class IndexedDatasetBuilder:
    """Writes ``prefix.bin`` and ``prefix.idx``, byte for byte as Megatron-LM does.

    Tokens are written aside as they come. ``finish`` syncs the files to disk and renames them
    into place, the index last. Used as a context manager, it finishes at the end of the block,
    and an exception publishes nothing and removes what was written. ::

        with IndexedDatasetBuilder("corpus", dtype=np.uint16) as builder:
            builder.add_document([5, 3, 9])

    Whatever happens, ``IndexedDataset(prefix)`` opens what stood there before or all that was
    built, never some of each: another builder of the same prefix, a kill at any write, a full
    disk (see ``data/publish.py``). With ``overwrite=True`` it replaces what stands there; of
    several builders, the last to finish. With ``append=True`` it begins with what stands there,
    copied, and is refused at the end if another builder has replaced that.

    Beside the two files it writes ``prefix.hashes``, the 64-bit content hash of each document,
    and ``prefix.manifest.json`` with counts, dtype, ``tokenizer`` (any text that names it) and
    hashes of the files. With ``multimodal=True`` each sequence has a mode, by default 0.

    Shapes: ``tokens`` [any number], integers; a sequence has at most 2**31 - 1 of them.
    20 bytes of memory a document of one sequence.

    Sends nothing.

    Raises:
        FileExistsError: a dataset, or half of one, stands under ``prefix``.
        ValueError: a token id does not fit ``dtype`` (ids never wrap), lengths do not sum to
            the tokens, modes do not fit, sequences belong to no document, or datasets of two
            tokenizers are merged. The builder is as it was before that call and can go on.
        RuntimeError: what was appended to has been replaced.

    Source: the ``.idx``/``.bin`` format of https://github.com/NVIDIA/Megatron-LM.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        dtype: DTypeLike,
        *,
        overwrite: bool = False,
        append: bool = False,
        multimodal: bool = False,
        tokenizer: str | None = None,
    ) -> None:
        self.prefix = prefix_of(prefix)
        if "://" in self.prefix:
            raise ValueError(f"prefix={self.prefix!r} must be on this machine; copy what it built")
        if overwrite and append:
            raise ValueError("overwrite=True and append=True must not be given together")
        self.dtype = token_dtype(dtype)
        if tokenizer is not None and not isinstance(tokenizer, str):
            raise ValueError(f"tokenizer={tokenizer!r} must be text that names it")
        self.multimodal = multimodal
        self.tokenizer = tokenizer
        self._append_mode = append
        self._lengths = array("i")
        self._document_indices = array("q", [0])
        self._modes = array("b")
        self._hashes = array("Q")
        self._content = ContentHash()  # of the open document
        self._files = Staging(self.prefix, overwrite=overwrite or append)
        self._tokens = self._files.files[".bin"]
        if append:
            try:
                self.add_index(self.prefix)
            except BaseException:
                self.discard()
                raise

    def add_item(self, tokens: ArrayLike, mode: int = 0) -> None:
        """Add one sequence to the open document."""
        fitting = self._fitting(tokens)
        modes = self._fitting_modes([whole_number("mode", mode, -128, 127)], 1)
        self._append(fitting, [len(fitting)], modes)

    def end_document(self) -> None:
        """Close the document of all sequences added since the last one was closed."""
        self._refuse_closed()
        self._document_indices.append(len(self._lengths))
        self._hashes.append(self._content.value())
        self._content = ContentHash()

    def add_document(
        self,
        tokens: ArrayLike,
        lengths: Sequence[int] | None = None,
        modes: Sequence[int] | None = None,
    ) -> None:
        """Add a document of one sequence, or cut into sequences of ``lengths``, and close it."""
        fitting = self._fitting(tokens)
        each = [len(fitting)] if lengths is None else row("lengths", lengths).tolist()
        if min(each, default=0) < 0 or sum(each) != len(fitting):
            raise ValueError(
                f"lengths of sum {sum(each)} must be 0 or more each and sum to the "
                f"{len(fitting)} tokens given"
            )
        modes = self._fitting_modes([0] * len(each) if modes is None else modes, len(each))
        self._append(fitting, each, modes)
        self.end_document()

    def add_index(self, prefix: str | os.PathLike[str]) -> None:
        """Add all sequences and documents of another dataset, whose every entry is checked.

        Ids are copied by value: one of another dtype is converted, or refused if it does not
        fit. Where the other has no modes and this one does, they are 0.
        """
        self._refuse_closed()
        other = IndexedDataset(prefix)
        self._refuse_to_merge(other)
        other.verify()
        before, modes = len(self._lengths), other.sequence_modes
        hashes = other.content_hashes()
        if hashes is None or (other.dtype.kind == "f") != (self.dtype.kind == "f"):
            hashes = hash_documents(other, self.dtype)
        pieces = range(0, other.num_tokens, PIECE)
        if not np.can_cast(other.dtype, self.dtype, "safe"):
            for first in pieces:  # all fit before any is written
                self._fitting(other.tokens[first : first + PIECE])
        for first in pieces:
            self._write(other.tokens[first : first + PIECE])
        self._note(
            np.asarray(other.sequence_lengths),
            np.zeros(len(other), np.int8) if modes is None else np.asarray(modes),
        )
        ends = np.asarray(other.document_indices)[1:] + before
        self._document_indices.frombytes(ends.astype(np.int64).tobytes())
        self._hashes.frombytes(hashes.astype(np.uint64).tobytes())
        if self.tokenizer is None and other.manifest:
            self.tokenizer = other.manifest.tokenizer

    def finish(self) -> None:
        """Publish the dataset; the builder takes nothing after it."""
        self._refuse_closed()
        if self._open_sequences:
            raise ValueError(
                f"{self._open_sequences} sequences must be closed by end_document() before finish()"
            )
        try:
            write_index(
                self._files.create(".idx"),
                self.dtype,
                np.frombuffer(self._lengths, np.intc),
                np.frombuffer(self._document_indices, np.int64),
                np.frombuffer(self._modes, np.int8) if self.multimodal else None,
            )
            hashes = np.frombuffer(self._hashes, np.uint64)
            self._files.create(".hashes").write(hashes.astype("<u8").data)
            self._files.publish(self._manifest, grown=self._append_mode)
        finally:
            self.discard()

    def discard(self) -> None:
        """Remove what was written aside; nothing is published."""
        self._files.discard()

    def __enter__(self) -> "IndexedDatasetBuilder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None and self._files.alive:
                self.finish()
        finally:
            self.discard()

    @property
    def _open_sequences(self) -> int:
        return len(self._lengths) - self._document_indices[-1]

    def _fitting(self, tokens: ArrayLike) -> np.ndarray:
        """Return the tokens as an array whose values all fit the dtype of the dataset."""
        try:
            given = np.asarray(tokens)
        except (TypeError, ValueError) as error:
            raise ValueError(f"tokens must be a row of numbers: {error}") from None
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

    def _fitting_modes(self, modes: Sequence[int], sequences: int) -> list[int]:
        """Return the modes of some sequences, which all fit int8."""
        fitting = row("modes", modes).tolist()
        if len(fitting) != sequences:
            raise ValueError(f"modes={fitting} must be one for each of the {sequences} sequences")
        for mode in fitting:
            if not -128 <= mode <= 127:
                raise ValueError(f"mode={mode} must be between -128 and 127")
            if mode and not self.multimodal:
                raise ValueError(f"mode={mode} needs multimodal=True")
        return fitting

    def _append(self, tokens: np.ndarray, lengths: Sequence[int], modes: Sequence[int]) -> None:
        """Write tokens that fit, and note their lengths and modes, or discard everything."""
        self._refuse_closed()
        if (longest := max(lengths, default=0)) > LONGEST_SEQUENCE:
            raise ValueError(f"a sequence of {longest} tokens must have at most {LONGEST_SEQUENCE}")
        for first in range(0, len(tokens), PIECE):
            piece = tokens[first : first + PIECE]
            self._write(piece)
            self._content.update(piece.astype(self.dtype, copy=False))
        self._note(np.array(lengths, np.intc), np.array(modes, np.int8))

    def _write(self, tokens: np.ndarray) -> None:
        try:
            self._tokens.write(np.ascontiguousarray(tokens, self.dtype).data)
        except BaseException:  # part of the bytes may be in the file: later tokens would shift
            self.discard()
            raise

    def _note(self, lengths: np.ndarray, modes: np.ndarray) -> None:
        self._lengths.frombytes(lengths.astype(np.intc).tobytes())
        self._modes.frombytes(modes.astype(np.int8).tobytes())

    def _refuse_to_merge(self, other: IndexedDataset) -> None:
        if self._open_sequences:
            raise ValueError(
                f"{self._open_sequences} sequences must be closed by end_document() "
                f"before add_index({other.prefix!r})"
            )
        if other.sequence_modes is not None and not self.multimodal:
            raise ValueError(f"{other.index_path}: has modes, which needs multimodal=True")
        theirs = other.manifest.tokenizer if other.manifest else None
        if None not in (theirs, self.tokenizer) and theirs != self.tokenizer:
            raise ValueError(
                f"{other.prefix}: its tokenizer {theirs!r} must be {self.tokenizer!r} as before"
            )

    def _manifest(self, files: dict[str, FileRecord]) -> Manifest:
        return Manifest(
            build=self._files.build,
            dtype=self.dtype.name,
            num_sequences=len(self._lengths),
            num_documents=len(self._document_indices) - 1,
            num_tokens=files[".bin"].size // self.dtype.itemsize,
            tokenizer=self.tokenizer,
            files=files,
        )

    def _refuse_closed(self) -> None:
        if not self._files.alive:
            raise ValueError(f"the builder of {self.prefix} is finished or discarded")
