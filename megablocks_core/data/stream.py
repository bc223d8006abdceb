"""The documents of a split, end to end, as one stream of tokens.

Dimensions: D documents of the split, N tokens of the stream, B windows of it, P parts: a part is
what one window holds of one document.
"""

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from megablocks_core.data.indexed import IndexedDataset
from megablocks_core.data.split import SequenceSplit, Split, checked_documents

# A contiguous split of up to this many documents keeps their offsets in memory (8 MB), which finds
# documents twenty times faster; a larger one is searched in the mapped index.
IN_MEMORY = 1 << 20


class Parts(NamedTuple):
    """Some windows, cut where documents begin; each array is [P] int64, in the windows' order."""

    windows: np.ndarray  # which window, 0 to B - 1
    columns: np.ndarray  # first token, counted in the window
    documents: np.ndarray  # number of the document in the dataset
    offsets: np.ndarray  # first token, counted in the document
    starts: np.ndarray  # first token, counted in all tokens of the dataset
    lengths: np.ndarray  # tokens, at least 1


class Stream:
    """Finds the documents of windows of the stream, by binary search.

    Nothing is built for a contiguous split, whatever its size; documents chosen one by one need
    their offsets [D + 1], those of the split or the sum of their lengths. Pickles as its arguments.

    Raises:
        ValueError: documents that are not those of ``indexed``, or not in increasing order.
    """

    def __init__(self, indexed: IndexedDataset, split: Split) -> None:
        if isinstance(split, SequenceSplit):
            raise ValueError(f"split {split.name!r} of sequences needs order='megatron'")
        self.indexed, self.split = indexed, split
        self._offsets: np.ndarray | None = None
        documents = checked_documents(split, indexed.num_documents)
        if isinstance(documents, range):
            self._first_token = indexed.document_start(documents.start)
            self.num_tokens = indexed.document_start(documents.stop) - self._first_token
        else:
            self._offsets = split.offsets
            if self._offsets is None:
                self._offsets = np.concatenate([[0], self._lengths(documents).cumsum()])
            else:
                self._check_offsets(self._offsets, documents)
            self.num_tokens = int(self._offsets[-1])

    def _lengths(self, documents: np.ndarray) -> np.ndarray:
        return self._tokens_before(documents + 1) - self._tokens_before(documents)

    def _check_offsets(self, offsets: np.ndarray, documents: np.ndarray) -> None:
        """Raise if the documents have other lengths here than where the split was made.

        A few thousand are compared, so that opening stays quick.
        """
        some = np.unique(np.linspace(0, len(documents) - 1, 4096).astype(np.int64))
        if not len(documents):
            return
        told, found = offsets[some + 1] - offsets[some], self._lengths(documents[some])
        if (told != found).any():
            at = int((told != found).argmax())
            raise ValueError(
                f"split {self.split.name!r} says that document {documents[some[at]]} has "
                f"{told[at]} tokens, must say {found[at]}: it was made of another dataset"
            )

    def parts(self, starts: np.ndarray, length: int) -> Parts:
        """Cut windows of ``length`` tokens, which begin at ``starts`` [B] of the stream."""
        first, last = self._find(starts), self._find(starts + (length - 1))
        counts = last - first + 1
        windows = np.arange(len(starts)).repeat(counts)
        nth = np.arange(len(windows)) + (first - counts.cumsum() + counts)[windows]
        offsets, begins = self._offsets_of(nth), starts[windows]
        part_starts = np.maximum(offsets, begins)
        lengths = np.minimum(self._offsets_of(nth + 1), begins + length) - part_starts
        if lengths.min(initial=1) < 1:  # empty documents have no part
            full = lengths > 0
            windows, nth, offsets = windows[full], nth[full], offsets[full]
            begins, part_starts, lengths = begins[full], part_starts[full], lengths[full]
        documents = self.split.documents
        if isinstance(documents, range):
            numbers, tokens = nth + documents.start, part_starts + self._first_token
        else:
            numbers = documents[nth]
            tokens = self._tokens_before(numbers) + (part_starts - offsets)
        columns = part_starts - begins
        return Parts(windows, columns, numbers, part_starts - offsets, tokens, lengths)

    def _find(self, places: np.ndarray) -> np.ndarray:
        """Return which document of the split holds each place of the stream."""
        documents = self.split.documents
        if self._offsets is None and len(documents) <= IN_MEMORY:
            assert isinstance(documents, range)
            self._offsets = self._starts_of(documents) - self._first_token
        if self._offsets is not None:
            return self._offsets.searchsorted(places, side="right") - 1
        numbers, start = range(self.indexed.num_documents), self.indexed.document_start
        assert isinstance(documents, range)
        found = [
            bisect_right(numbers, place, documents.start, documents.stop, key=start) - 1
            for place in (places + self._first_token).tolist()
        ]
        return np.array(found, np.int64) - documents.start

    def _offsets_of(self, nth: np.ndarray) -> np.ndarray:
        if self._offsets is not None:
            return self._offsets[nth]
        assert isinstance(self.split.documents, range)
        return self._tokens_before(nth + self.split.documents.start) - self._first_token

    def _starts_of(self, documents: range) -> np.ndarray:
        """Return where neighbouring documents begin, and the last one ends, in one read each."""
        sequences = self.indexed.document_indices[documents.start : documents.stop + 1]
        pointers = self.indexed.sequence_pointers[sequences[0] : sequences[-1] + 1]
        starts = pointers // self.indexed.dtype.itemsize
        if sequences[-1] == len(self.indexed):
            starts = np.append(starts, self.indexed.num_tokens)
        return starts[sequences - sequences[0]]

    def _tokens_before(self, documents: np.ndarray) -> np.ndarray:
        """Return where documents begin in all tokens; document D begins where they end."""
        sequences = self.indexed.document_indices[documents]
        if not len(self.indexed):
            return np.zeros(len(sequences), np.int64)
        pointers = self.indexed.sequence_pointers[np.minimum(sequences, len(self.indexed) - 1)]
        starts = pointers // self.indexed.dtype.itemsize
        return np.where(sequences < len(self.indexed), starts, self.indexed.num_tokens)

    def __reduce__(self) -> tuple[type["Stream"], tuple[IndexedDataset, Split]]:
        return type(self), (self.indexed, self.split)
