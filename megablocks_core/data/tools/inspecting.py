"""What is in a dataset: counts, lengths, ids, and what was recorded of it."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megablocks_core.data.checks import whole_number
from megablocks_core.data.index_file import HEADER
from megablocks_core.data.indexed import IndexedDataset
from megablocks_core.data.manifest import Manifest
from megablocks_core.data.tools.documents import TOKENS, blocks, open_dataset, pieces
from megablocks_core.files.progress import Progress

SOURCE = ".source.json"  # what wrote a dataset records there


class Bin(NamedTuple):
    """Documents of ``least`` to ``most`` tokens: how many, and their tokens."""

    least: int
    most: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class Lengths:
    """How long documents are, in tokens.

    Attributes:
        empty: Documents of none.
        least: The shortest.
        mean: Of all.
        median: Half of the documents are at most that long; ``p90`` and ``p99`` likewise.
        p90: For 90 in 100 documents.
        p99: For 99 in 100.
        most: The longest.
        histogram: By powers of two: 0, 1, 2 to 3, 4 to 7 and so on, from the shortest on.
    """

    empty: int
    least: int
    mean: float
    median: int
    p90: int
    p99: int
    most: int
    histogram: list[Bin]


@dataclass(frozen=True)
class Ids:
    """Which ids the tokens are.

    Attributes:
        least: The smallest, ``None`` where there is no token.
        most: The largest.
        vocab_size: That they were held against.
        outside: How many are no id of it.
    """

    least: int | None
    most: int | None
    vocab_size: int | None
    outside: int


@dataclass(frozen=True)
class Inspection:
    """What is in a dataset.

    Attributes:
        prefix: Of its files.
        documents: How many.
        sequences: Of all of them.
        tokens: Of all of them.
        dtype: That they are stored in.
        bytes: Of the index and the tokens.
        lengths: Of the documents; ``None`` if there is none.
        ids: ``None`` if they were not read.
        manifest: What the builder recorded.
        source: What was recorded of where it came from, of this very build.
    """

    prefix: str
    documents: int
    sequences: int
    tokens: int
    dtype: str
    bytes: int
    lengths: Lengths | None
    ids: Ids | None
    manifest: Manifest | None
    source: dict[str, Any] | None


def inspect(
    prefix: str | os.PathLike[str],
    *,
    vocab_size: int | None = None,
    read_ids: bool = True,
    progress: Progress | None = None,
) -> Inspection:
    """Look at a dataset; memory does not grow with it.

    Args:
        prefix: Of its files, or their URL.
        vocab_size: Ids must be below.
        read_ids: Read all tokens for ``ids``; without it the index alone is read.
        progress: Told of the bytes of tokens read.

    Raises:
        DamagedDataset: The files are damaged.
    """
    if vocab_size is not None:
        vocab_size = whole_number("vocab_size", vocab_size, 1)
    dataset = open_dataset(prefix)
    tokens: Any = dataset.tokens
    index = dataset.sequence_lengths.nbytes + dataset.sequence_pointers.nbytes
    modes = dataset.sequence_modes
    index += dataset.document_indices.nbytes + (0 if modes is None else modes.nbytes) + HEADER.size
    return Inspection(
        prefix=dataset.prefix,
        documents=dataset.num_documents,
        sequences=len(dataset),
        tokens=dataset.num_tokens,
        dtype=dataset.dtype.name,
        bytes=int(tokens.nbytes + index),
        lengths=lengths_of(dataset),
        ids=ids_of(dataset, vocab_size, progress) if read_ids else None,
        manifest=dataset.manifest,
        source=source_of(dataset),
    )


def lengths_of(dataset: IndexedDataset) -> Lengths | None:
    """How long the documents are; exact, by counting each length."""
    lengths = np.empty(0, np.int64)
    counts = np.empty(0, np.int64)
    for _, bounds in blocks(dataset):
        found, times = np.unique(np.diff(bounds), return_counts=True)
        both = np.concatenate([lengths, found])
        lengths, places = np.unique(both, return_inverse=True)
        counts = np.bincount(places, np.concatenate([counts, times])).astype(np.int64)
    return _summary(lengths, counts) if len(lengths) else None


def ids_of(
    dataset: IndexedDataset, vocab_size: int | None = None, progress: Progress | None = None
) -> Ids | None:
    """Which ids the tokens are; ``None`` where they are no integers."""
    if dataset.dtype.kind not in "iu":
        return None
    tokens: Any = dataset.tokens
    least, most, outside = None, None, 0
    for first, last in pieces(0, dataset.num_tokens, tokens=4 * TOKENS):
        some = tokens[first:last]
        low, high = int(some.min()), int(some.max())
        least = low if least is None else min(least, low)
        most = high if most is None else max(most, high)
        if vocab_size is not None and (low < 0 or high >= vocab_size):
            outside += int(np.count_nonzero((some < 0) | (some >= vocab_size)))
        if progress:
            progress.add(some.nbytes)
    return Ids(least, most, vocab_size, outside)


def source_of(dataset: IndexedDataset) -> dict[str, Any] | None:
    """What ``PREFIX.source.json`` says, if it is of the build that is there."""
    if dataset.manifest is None or "://" in dataset.prefix:
        return None
    with suppress(OSError, ValueError, RecursionError), open(dataset.prefix + SOURCE, "rb") as file:
        found = json.loads(file.read())
        if isinstance(found, dict) and found.get("build") == dataset.manifest.build:
            return found
    return None


def _summary(lengths: np.ndarray, counts: np.ndarray) -> Lengths:
    """What is said of documents of some lengths, in order, and how often there is each."""
    below = np.cumsum(counts)
    total = int(below[-1])

    def at_most(percent: int) -> int:
        """The least length that so many documents in a hundred do not exceed."""
        return int(lengths[below.searchsorted(-(-total * percent // 100))])

    powers = [0, *(1 << power for power in range(int(lengths[-1]).bit_length() + 1))]
    places = lengths.searchsorted(powers)
    histogram = [
        Bin(low, high - 1, int(counts[a:b].sum()), int((lengths[a:b] * counts[a:b]).sum()))
        for low, high, a, b in zip(powers, powers[1:], places, places[1:], strict=False)
        if b > 0
    ]
    return Lengths(
        empty=int(counts[0]) if lengths[0] == 0 else 0,
        least=int(lengths[0]),
        mean=int((lengths * counts).sum()) / total,
        median=at_most(50),
        p90=at_most(90),
        p99=at_most(99),
        most=int(lengths[-1]),
        histogram=histogram,
    )
