"""Samples of a fixed length that are filled with pieces of documents.

Dimensions: S sequence length, B samples of a batch, T = B S tokens, P pieces.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from megablocks_core.data.checks import whole_number
from megablocks_core.data.collate import NO_DOCUMENT, host_and_device
from megablocks_core.data.epoch_order import EpochOrder
from megablocks_core.data.fingerprint import facts_of_split, fingerprint
from megablocks_core.data.indexed import IndexedDataset
from megablocks_core.data.instructions.learnt import ranges
from megablocks_core.data.packing import Bins
from megablocks_core.data.place import Place
from megablocks_core.data.samples import IndexedSamples
from megablocks_core.data.split import Split, checked_documents


class Pieces(NamedTuple):
    """Ranges of documents' tokens; each array is [P] int64.

    Attributes:
        documents: Of the dataset.
        offsets: First token, counted in the document.
        starts: First token, counted in all tokens of the dataset.
        lengths: Tokens, at least 1.
        labels: How many of them have a next one in the document.
    """

    documents: np.ndarray
    offsets: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    labels: np.ndarray


class Layout(NamedTuple):
    """Where the pieces of a batch lie; each array is [number of pieces in it].

    Attributes:
        items: Numbers of the pieces.
        rows: Of the batch, that each is in.
        nth: How many stand before it in its row.
        spans: Tokens that each takes.
        places: First token, counted in the batch.
    """

    items: np.ndarray
    rows: np.ndarray
    nth: np.ndarray
    spans: np.ndarray
    places: np.ndarray


class Filled(NamedTuple):
    """What a batch is filled into, each array [T]."""

    tokens: np.ndarray
    labels: np.ndarray
    loss_mask: np.ndarray


class PackedSamples(IndexedSamples):
    """What packed datasets share: samples, from the pieces that each of them holds.

    ``tokens``, ``labels``, ``position_ids`` [S] int64, ``loss_mask`` [S] float32 and ``cu_seqlens``
    [pieces + 1] int64 are those of a ``GPTDataset``. Each piece is a document of its own: it
    sees no other, and its positions begin at 0. No label is another piece's token: where there is
    none, label and mask are 0. What is left at the end of a sample is filled with 0, as one more
    document, without loss.
    """

    def __init__(
        self, indexed: IndexedDataset, sequence_length: int, *, seed: int, split: Split | None
    ) -> None:
        super().__init__(indexed, seed=seed, split=split)
        self.sequence_length = whole_number("sequence_length", sequence_length, 1)
        documents = checked_documents(self.split, indexed.num_documents)
        self._documents = np.asarray(documents, np.int64)
        self.samples_per_epoch = 0

    @cached_property
    def fingerprint(self) -> str:
        """What changes with the order or the tokens, and not with the number of samples."""
        return fingerprint(
            tokens=self.indexed.fingerprint,
            split=facts_of_split(self.split),
            sequence_length=self.sequence_length,
            seed=self.seed,
            **self._facts,
        )

    def batch(self, samples: Sequence[int] | np.ndarray) -> dict[str, Any]:
        """Return samples laid end to end, as ``GPTDataset.batch`` does.

        The document id of what fills a sample up is -1.
        """
        ids, length = self._checked(samples), self.sequence_length
        layout = self._layout(ids)
        num_tokens = len(ids) * length
        tokens_T, labels_T = np.zeros((2, num_tokens), np.int64)
        filled = Filled(tokens_T, labels_T, np.zeros(num_tokens, np.float32))
        self._fill(ids, layout, filled)
        loads = np.bincount(layout.rows, layout.spans, len(ids)).astype(np.int64)
        fillings = np.flatnonzero(loads < length)
        fillings = fillings * length + loads[fillings]
        cu_seqlens = np.sort(np.concatenate([layout.places, fillings, [num_tokens]]))
        firsts = cu_seqlens[:-1]
        document_ids = ids[firsts // length] * length + firsts % length
        document_ids[np.searchsorted(firsts, fillings)] = NO_DOCUMENT
        positions_T = np.arange(num_tokens) - firsts.repeat(np.diff(cu_seqlens))
        return {
            **{name: values[None] for name, values in filled._asdict().items()},
            "position_ids": positions_T[None],
            **host_and_device(cu_seqlens),
            "sample_ids": ids,
            "document_ids": document_ids,
        }

    def num_loss_tokens(self, samples: Sequence[int] | np.ndarray) -> int:
        """Return the sum of the loss masks of some samples, without reading a token."""
        ids = self._checked(samples)
        return int(self._loss(ids, self._layout(ids)).sum())

    def locate(self, sample: int) -> Place:
        """Return the documents, and the ranges of their tokens, that a sample is made of."""
        items, pieces = self._layout(self._checked([sample])).items, self._pieces
        offsets = pieces.offsets[items]
        columns = (pieces.documents[items], offsets, offsets + pieces.lengths[items])
        ranges_of = zip(*(column.tolist() for column in columns), strict=True)
        return Place(self.split.name, list(ranges_of))

    @property
    @abstractmethod
    def _facts(self) -> dict[str, Any]:
        """What else decides the samples."""

    @property
    @abstractmethod
    def _pieces(self) -> Pieces:
        """All pieces, whichever samples they are in."""

    @abstractmethod
    def _items(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of the pieces of samples, one sample after another, and how many of each."""

    @abstractmethod
    def _loss(self, samples: np.ndarray, layout: Layout) -> np.ndarray:
        """How many labels of each piece of some samples count."""

    def _spans(self, samples: np.ndarray, nth: np.ndarray, items: np.ndarray) -> np.ndarray:
        """How many tokens each piece takes, which stands as the nth in its sample."""
        return self._pieces.lengths[items]

    def _fill(self, samples: np.ndarray, layout: Layout, into: Filled) -> None:
        """Write the pieces of some samples where they lie."""
        pieces, items = self._pieces, layout.items
        starts, lengths, labels = (
            column[items] for column in (pieces.starts, pieces.lengths, pieces.labels)
        )
        into.tokens[ranges(layout.places, lengths)] = self._read(starts, lengths)
        at = ranges(layout.places, labels)
        into.labels[at] = self._read(starts + 1, labels)
        into.loss_mask[at] = 1

    def _layout(self, samples: np.ndarray) -> Layout:
        items, counts = self._items(samples)
        rows = np.arange(len(samples)).repeat(counts)
        firsts = np.cumsum(counts) - counts
        nth = np.arange(len(items)) - firsts[rows]
        spans = self._spans(samples[rows], nth, items)
        before = np.cumsum(spans) - spans
        columns = before - before[firsts[rows]]  # no sample is without a piece
        return Layout(items, rows, nth, spans, rows * self.sequence_length + columns)


class BinnedSamples(PackedSamples):
    """Samples that are bins of pieces; each epoch has all of them, in an order of its own."""

    def _pack(self, pieces: Pieces, bins: Bins, num_samples: int | None) -> None:
        """Set what the samples are; by default there are those of one epoch."""
        self._binned, self._bins = pieces, bins
        self.samples_per_epoch = self._length = len(bins.bounds) - 1
        self._order = EpochOrder(self.samples_per_epoch, seed=self.seed)
        if num_samples is not None:
            self._length = whole_number("num_samples", num_samples, 1)

    @property
    def _pieces(self) -> Pieces:
        return self._binned

    def _items(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        packs = self._order(samples)
        firsts, lasts = (self._bins.bounds[packs + end] for end in (0, 1))
        return self._bins.items[ranges(firsts, lasts - firsts)], lasts - firsts
