"""The documents of a dataset, some at a time: where each begins, and its tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from megablocks_core.data.checks import prefix_of
from megablocks_core.data.indexed import IndexedDataset

DOCUMENTS = 1 << 16  # looked at together, at most
TOKENS = 1 << 20  # read together, at most


class DamagedDataset(ValueError):
    """The files of a dataset are not what was written, or do not belong together."""


def open_dataset(prefix: str | os.PathLike[str]) -> IndexedDataset:
    """Open a dataset.

    Raises:
        DamagedDataset: Its files are damaged.
        FileNotFoundError: There is none.
    """
    prefix = prefix_of(prefix)
    try:
        return IndexedDataset(prefix)
    except ValueError as error:
        raise DamagedDataset(str(error)) from error


def bounds_of(dataset: IndexedDataset, first: int, last: int) -> np.ndarray:
    """Where documents ``first`` to ``last - 1`` begin in the tokens, and the last of them ends."""
    sequences = np.asarray(dataset.document_indices[first : last + 1])
    begins, end = int(sequences[0]), int(sequences[-1])
    starts = np.append(dataset.sequence_pointers[begins : end + 1], dataset.tokens.nbytes)
    return np.asarray(starts[sequences - begins], np.int64) // dataset.dtype.itemsize


def blocks(
    dataset: IndexedDataset, *, documents: int = DOCUMENTS
) -> Iterator[tuple[int, np.ndarray]]:
    """Go through all documents: the first of each block, and the bounds of its documents.

    Memory is that of a block, whatever the size of the dataset: the sequences of a block are
    as few as its documents where each is one, as usual.
    """
    for first in range(0, dataset.num_documents, documents):
        yield first, bounds_of(dataset, first, min(first + documents, dataset.num_documents))


def pieces(start: int, stop: int, *, tokens: int = TOKENS) -> Iterator[tuple[int, int]]:
    """Cut a range of tokens into ranges that are read at once."""
    for first in range(start, stop, tokens):
        yield first, min(first + tokens, stop)


def equal_tokens(
    one: IndexedDataset, tokens: tuple[int, int], other: IndexedDataset, others: tuple[int, int]
) -> bool:
    """Whether two ranges of tokens hold the same ids, whatever dtypes they are stored in."""
    (start, stop), (begin, end) = tokens, others
    if stop - start != end - begin:
        return False
    ours: Any = one.tokens
    theirs: Any = other.tokens
    return all(
        np.array_equal(ours[a:b], theirs[begin + a - start : begin + b - start])
        for a, b in pieces(start, stop)
    )


def refuse_floats(dataset: IndexedDataset) -> None:
    """Refuse tokens that are no ids.

    Raises:
        ValueError: They are floats.
    """
    if dataset.dtype.kind not in "iu":
        raise ValueError(f"{dataset.index_path}: holds {dataset.dtype.name}, must hold integers")


def refuse_two_tokenizers(datasets: Sequence[IndexedDataset]) -> None:
    """Refuse datasets in which equal ids are not equal texts.

    Raises:
        ValueError: The manifests of two name two tokenizers.
    """
    seen: dict[str, str] = {}
    for dataset in datasets:
        if dataset.manifest and dataset.manifest.tokenizer is not None:
            seen.setdefault(dataset.manifest.tokenizer, dataset.prefix)
    if len(seen) > 1:
        (one, first), (other, second), *_ = seen.items()
        raise ValueError(f"{second}: its tokenizer {other!r} must be {one!r}, as that of {first}")
