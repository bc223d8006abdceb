"""Which documents are there twice, within some datasets and in others: exact, by content.

Of equal documents the first is the one that the others are compared with. A hit by hash counts
only after the ids themselves were compared.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from megablocks_core.data.checks import several, whole_number
from megablocks_core.data.indexed import IndexedDataset
from megablocks_core.data.tools.documents import (
    equal_tokens,
    open_dataset,
    refuse_floats,
    refuse_two_tokenizers,
)
from megablocks_core.data.tools.hash_records import LEAST_MEMORY, RECORD, HashRecords
from megablocks_core.files.progress import Progress

MEMORY = 1 << 28
PAIRS = 10  # that are named


class Pair(NamedTuple):
    """A document, and the first one that it equals."""

    prefix: str
    document: int
    same_as: str
    same_document: int
    tokens: int


@dataclass(frozen=True)
class Checked:
    """What was found of one dataset.

    Attributes:
        prefix: Of its files.
        documents: How many it has.
        tokens: Of all of them.
        empty: Documents without tokens, which equal none here.
        duplicates: Documents that equal one before, in this dataset or one named before it.
        duplicate_tokens: Of them.
        overlap: Documents that one of the other side equals.
        overlap_tokens: Of them.
    """

    prefix: str
    documents: int
    tokens: int
    empty: int
    duplicates: int
    duplicate_tokens: int
    overlap: int
    overlap_tokens: int


@dataclass(frozen=True)
class Check:
    """What was found.

    Attributes:
        datasets: Of each prefix, in order.
        against: The prefixes of the other side.
        duplicates: The first pairs of equal documents.
        overlaps: The first pairs of a document and its equal of the other side.
    """

    datasets: list[Checked]
    against: list[str]
    duplicates: list[Pair]
    overlaps: list[Pair]

    @property
    def found(self) -> bool:
        """Whether any two documents are equal."""
        return any(one.duplicates or one.overlap for one in self.datasets)


def check(
    prefixes: Iterable[str | os.PathLike[str]],
    *,
    against: Iterable[str | os.PathLike[str]] = (),
    memory: int = MEMORY,
    pairs: int = PAIRS,
    folder: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Check:
    """Find documents of ``prefixes`` that equal an earlier one, or any of ``against``.

    Equal are documents of the same ids, whatever dtypes hold them. Those without tokens are
    counted and left out. Equal documents of ``against`` alone are not looked for.

    All tokens are read once, and those of equal documents again. A record of 24 bytes a document
    is set aside in files without a name in ``folder``.

    Args:
        prefixes: Of the datasets, such as the parts of a training set.
        against: Of others, such as a validation set.
        memory: Bytes that may be taken, 4 MiB or more, beside what opening a dataset takes.
        pairs: How many pairs to name.
        folder: By default the system's for temporary files.
        progress: Told of the bytes of tokens read.

    Raises:
        ValueError: An argument is wrong, a dataset is named twice or holds no ids, or two are of
            two tokenizers, so that equal ids are not equal texts.
        DamagedDataset: The files of a dataset are damaged.
    """
    memory = whole_number("memory", memory, LEAST_MEMORY)
    pairs = whole_number("pairs", pairs, 0)
    others = [open_dataset(prefix) for prefix in several("against", against)]
    ours = [open_dataset(prefix) for prefix in several("prefixes", prefixes)]
    if not ours:
        raise ValueError("prefixes=[] must name at least one dataset")
    datasets = others + ours
    _refuse_unlike(datasets)
    records = HashRecords(datasets, memory=memory, folder=folder, progress=progress)
    try:
        search = _Search(datasets, len(others), records.starts, pairs)
        for part in records.parts():
            search.go_through(part)
    finally:
        records.close()
    return search.result(records.empty)


def _refuse_unlike(datasets: Sequence[IndexedDataset]) -> None:
    seen: set[str] = set()
    for dataset in datasets:
        refuse_floats(dataset)
        if dataset.prefix in seen:
            raise ValueError(f"prefix={dataset.prefix!r} must be named once")
        seen.add(dataset.prefix)
    refuse_two_tokenizers(datasets)


@dataclass
class _Found:
    """Pairs that were found in one of the two ways: counts, and the first by place."""

    documents: list[int]
    tokens: list[int]
    most: int
    first: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, dataset: int, place: int, same: int, tokens: int) -> None:
        self.documents[dataset] += 1
        self.tokens[dataset] += tokens
        self.first.append((place, same, tokens))
        if len(self.first) > 2 * self.most + 1000:
            self.settle()

    def settle(self) -> None:
        self.first = sorted(self.first)[: self.most]


class _Content(NamedTuple):
    """What documents of one hash hold, and where that is first, on the other side and on ours."""

    dataset: IndexedDataset
    tokens: tuple[int, int]
    first: list[int | None]


class _Search:
    """Goes through records by hash and compares what may be equal."""

    def __init__(
        self, datasets: list[IndexedDataset], others: int, starts: np.ndarray, pairs: int
    ) -> None:
        self._datasets, self._others = datasets, others
        self._starts = starts.tolist()
        none = [0] * len(datasets)
        self._twice, self._shared = (_Found([*none], [*none], pairs) for _ in range(2))

    def go_through(self, chunks: Iterator[np.ndarray]) -> None:
        """Compare the records of a part.

        The table holds, of each content, the first record of each side. A chunk joins it, sorted
        by hash; where hashes are equal, the documents are looked at.
        """
        table = np.empty(0, RECORD)
        for chunk in chunks:
            known = len(table)
            both = np.concatenate([table, chunk])
            order = np.lexsort((both["low"], both["high"]))  # stable: places stay in order
            both = both[order]
            alike = (both["high"][1:] == both["high"][:-1]) & (both["low"][1:] == both["low"][:-1])
            keep = np.ones(len(both), bool)
            for start, stop in _runs(alike):
                old = order[start:stop] < known
                places = both["place"][start:stop].tolist()
                keep[start:stop] = self._compare(places, old.tolist())
            table = both[keep]

    def result(self, empty: list[int]) -> Check:
        """What was found of this side."""
        self._twice.settle()
        self._shared.settle()
        rows = [
            Checked(
                prefix=dataset.prefix,
                documents=dataset.num_documents,
                tokens=dataset.num_tokens,
                empty=empty[number],
                duplicates=self._twice.documents[number],
                duplicate_tokens=self._twice.tokens[number],
                overlap=self._shared.documents[number],
                overlap_tokens=self._shared.tokens[number],
            )
            for number, dataset in enumerate(self._datasets)
        ]
        others = [row.prefix for row in rows[: self._others]]
        duplicates, overlaps = (
            [self._pair(*found) for found in kind.first] for kind in (self._twice, self._shared)
        )
        return Check(rows[self._others :], others, duplicates, overlaps)

    def _compare(self, places: list[int], old: list[bool]) -> list[bool]:
        """Which records of one hash go to the table; what is equal to one there is counted."""
        contents: list[_Content] = []
        keep = []
        for place, known in zip(places, old, strict=True):
            number, document = self._find(place)
            dataset = self._datasets[number]
            tokens = dataset.document_start(document), dataset.document_start(document + 1)
            for content in contents:
                if equal_tokens(content.dataset, content.tokens, dataset, tokens):
                    break
            else:
                contents.append(content := _Content(dataset, tokens, [None, None]))
            side = int(number >= self._others)
            shared, first = content.first
            if keeps := content.first[side] is None:
                content.first[side] = place
            keep.append(keeps)
            if known or not side:
                continue
            if first is not None:
                self._twice.add(number, place, first, tokens[1] - tokens[0])
            if shared is not None:
                self._shared.add(number, place, shared, tokens[1] - tokens[0])
        return keep

    def _find(self, place: int) -> tuple[int, int]:
        """The dataset of a place, and the document's number in it."""
        dataset = bisect_right(self._starts, place) - 1
        return dataset, place - self._starts[dataset]

    def _pair(self, place: int, same: int, tokens: int) -> Pair:
        (one, document), (other, same_document) = self._find(place), self._find(same)
        prefixes = self._datasets[one].prefix, self._datasets[other].prefix
        return Pair(prefixes[0], document, prefixes[1], same_document, tokens)


def _runs(alike: np.ndarray) -> Iterator[tuple[int, int]]:
    """The ranges of neighbours that are alike, two or more each."""
    edges = np.diff(np.concatenate([[0], alike.astype(np.int8), [0]]))
    starts, ends = np.flatnonzero(edges > 0), np.flatnonzero(edges < 0)
    yield from zip(starts.tolist(), (ends + 1).tolist(), strict=True)
