"""Indexed datasets as a source and as a target."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np

from megablocks_core.data.builder import IndexedDatasetBuilder
from megablocks_core.data.convert.documents import BadSource, Batch, Counts
from megablocks_core.data.indexed import IndexedDataset

_DOCUMENTS = 1 << 12  # at a time


class IndexedSource:
    """The documents of an indexed dataset, whose every byte is checked first.

    A document of several sequences is one of all their tokens, and is counted as ``joined``.

    Raises:
        BadSource: It is damaged.
        ValueError: Its sequences have modes, which no other format has.
    """

    def __init__(self, prefix: str) -> None:
        try:
            self._dataset = IndexedDataset(prefix)
            self._dataset.verify()
        except ValueError as error:
            raise BadSource(str(error)) from None
        if self._dataset.sequence_modes is not None:
            raise ValueError(f"{prefix}.idx: has modes, which no other format can hold")
        self.dtype, self.nbytes = self._dataset.dtype, self._dataset.tokens.nbytes
        manifest = self._dataset.manifest
        self.tokenizer = manifest.tokenizer if manifest else None

    def batches(self, counts: Counts) -> Iterator[Batch]:
        """All documents, in order."""
        dataset = self._dataset
        indices = dataset.document_indices
        starts, whole = dataset.sequence_pointers, dataset.num_tokens
        for first in range(0, dataset.num_documents, _DOCUMENTS):
            bounds = np.asarray(indices[first : first + _DOCUMENTS + 1])
            inside = np.asarray(starts)[bounds[bounds < len(dataset)]] // self.dtype.itemsize
            ends = np.append(inside, [whole] * (len(bounds) - len(inside))).astype(np.int64)
            counts.joined += int(np.count_nonzero(np.diff(bounds) > 1))
            tokens = dataset.tokens[int(ends[0]) : int(ends[-1])]
            yield Batch(tokens, np.diff(ends), tokens.nbytes)


def write_indexed(
    prefix: str | os.PathLike[str],
    batches: Iterator[Batch],
    dtype: np.dtype,
    *,
    tokenizer: str | None,
    overwrite: bool,
) -> int:
    """Write documents of one sequence each; returns how many files there are of tokens."""
    with IndexedDatasetBuilder(prefix, dtype, overwrite=overwrite, tokenizer=tokenizer) as builder:
        for batch in batches:
            for document in batch.documents():
                builder.add_document(document)
    return 1
