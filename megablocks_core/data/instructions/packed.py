"""Samples of a fixed length that are filled with pieces of documents.

Dimensions: S sequence length, B samples of a batch, T = B S tokens, P pieces.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np

from megablocks_core.data.checks import row, whole_number
from megablocks_core.data.collate import NO_DOCUMENT, PER_TOKEN, host_and_device
from megablocks_core.data.fingerprint import facts_of_split, fingerprint
from megablocks_core.data.gather import gather_tokens, gather_tokens_numpy
from megablocks_core.data.indexed import IndexedDataset
from megablocks_core.data.instructions.learnt import ranges
from megablocks_core.data.permutation import WORD
from megablocks_core.data.place import Place
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


class PackedSamples(ABC):
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
        if not isinstance(indexed, IndexedDataset):
            raise ValueError(f"indexed={indexed!r} must be an IndexedDataset")
        if indexed.dtype.kind not in "iu":
            raise ValueError(f"indexed.dtype={indexed.dtype.name} must be an integer type")
        self.indexed = indexed
        self.sequence_length = whole_number("sequence_length", sequence_length, 1)
        self.seed = whole_number("seed", seed, 0, WORD)
        self.split = Split("all", range(indexed.num_documents)) if split is None else split
        if not isinstance(self.split, Split):
            raise ValueError(f"split={split!r} must be a Split, such as one of split_documents()")
        documents = checked_documents(self.split, indexed.num_documents)
        self._documents = np.asarray(documents, np.int64)
        self.samples_per_epoch = self._length = 0

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, sample: int) -> dict[str, np.ndarray]:
        batch = self.batch([sample])
        return {name: batch[name][0] for name in PER_TOKEN} | {"cu_seqlens": batch["cu_seqlens"]}

    @property
    def tokenizer(self) -> str | None:
        """What names the tokenizer of the tokens, where a builder recorded it."""
        return self.indexed.manifest.tokenizer if self.indexed.manifest else None

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

    def resized(self, num_samples: int) -> Self:
        """Return the same samples in the same order, but as many as this."""
        other = copy.copy(self)
        other._length = whole_number("num_samples", num_samples, 1)
        return other

    def batch(self, samples: Sequence[int] | np.ndarray) -> dict[str, Any]:
        """Return samples laid end to end, as ``GPTDataset.batch`` does.

        The document id of what fills a sample up is -1.
        """
        ids, length = self._checked(samples), self.sequence_length
        layout = self._layout(ids)
        num_tokens = len(ids) * length
        tokens_T, labels_T = np.zeros((2, num_tokens), np.int64)
        loss_mask_T = np.zeros(num_tokens, np.float32)
        self._fill(ids, layout, tokens_T, labels_T, loss_mask_T)
        loads = np.bincount(layout.rows, layout.spans, len(ids)).astype(np.int64)
        fillings = np.flatnonzero(loads < length)
        fillings = fillings * length + loads[fillings]
        cu_seqlens = np.sort(np.concatenate([layout.places, fillings, [num_tokens]]))
        firsts = cu_seqlens[:-1]
        document_ids = ids[firsts // length] * length + firsts % length
        document_ids[np.searchsorted(firsts, fillings)] = NO_DOCUMENT
        positions_T = np.arange(num_tokens) - firsts.repeat(np.diff(cu_seqlens))
        return {
            "tokens": tokens_T[None],
            "labels": labels_T[None],
            "loss_mask": loss_mask_T[None],
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

    def _fill(
        self,
        samples: np.ndarray,
        layout: Layout,
        tokens_T: np.ndarray,
        labels_T: np.ndarray,
        loss_mask_T: np.ndarray,
    ) -> None:
        """Write the pieces of some samples where they lie."""
        pieces, items = self._pieces, layout.items
        starts, labels = pieces.starts[items], pieces.labels[items]
        tokens_T[ranges(layout.places, pieces.lengths[items])] = self._read(
            starts, pieces.lengths[items]
        )
        at = ranges(layout.places, labels)
        labels_T[at] = self._read(starts + 1, labels)
        loss_mask_T[at] = 1

    def _read(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        tokens: Any = self.indexed.tokens  # an array, or what reads like one from far away
        gather = gather_tokens if isinstance(tokens, np.ndarray) else gather_tokens_numpy
        found = np.empty(int(lengths.sum()), np.int64)
        gather(tokens, starts, lengths, out=found)
        return found

    def _layout(self, samples: np.ndarray) -> Layout:
        items, counts = self._items(samples)
        rows = np.arange(len(samples)).repeat(counts)
        firsts = np.cumsum(counts) - counts
        nth = np.arange(len(items)) - firsts[rows]
        spans = self._spans(samples[rows], nth, items)
        before = np.cumsum(spans) - spans
        columns = before - before[firsts[rows]]  # no sample is without a piece
        return Layout(items, rows, nth, spans, rows * self.sequence_length + columns)

    def _checked(self, samples: Sequence[int] | np.ndarray) -> np.ndarray:
        wanted = row("samples", samples)
        if wanted.size and not 0 <= wanted.min() <= wanted.max() < len(self):
            raise IndexError(f"samples {wanted.min()} to {wanted.max()} of {len(self)}")
        return wanted
