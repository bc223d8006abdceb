"""Long documents packed without needless cuts."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from megablocks_core.data.indexed import IndexedDataset
from megablocks_core.data.instructions.learnt import document_bounds, ranges
from megablocks_core.data.instructions.middle import ADDED, FillInTheMiddle
from megablocks_core.data.instructions.packed import BinnedSamples, Filled, Layout, Pieces
from megablocks_core.data.packing import best_fit_decreasing
from megablocks_core.data.split import Split


class PackedDocuments(BinnedSamples):
    """Samples of ``sequence_length`` tokens, each of whole documents as far as they fit into one.

    A document of more than S tokens is cut into windows of S and a rest; the windows, the rests and
    all shorter documents are packed by best fit, the longest first (``best_fit_decreasing``). So no
    document is cut that need not be, and each token is in one sample of an epoch. A window's last
    label is the document's next token; the last token of a document has none.

    An epoch has each sample once, in an order of its own that ``seed`` chooses, and the only state
    is the number of samples consumed. ``num_samples`` is the length, by default one epoch.

    With ``fill_in_the_middle``, documents and windows are rearranged, drawn by the number of the
    sample and their place in it: another time in another epoch. Each then keeps room for three
    marks, whether or not it comes to be rearranged.

    Shapes: as those of ``PackedConversations``. Takes 56 bytes of memory a document.

    Sends nothing; every rank computes any sample for itself.

    Raises:
        ValueError: No token to pack, a length with no room for the marks, tokens that are not
            integers.

    Source: H. Ding et al., Fewer truncations improve language modeling (2024), section 3.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        sequence_length: int,
        *,
        seed: int,
        split: Split | None = None,
        num_samples: int | None = None,
        fill_in_the_middle: FillInTheMiddle | None = None,
    ) -> None:
        super().__init__(indexed, sequence_length, seed=seed, split=split)
        self.fill_in_the_middle = fill_in_the_middle
        added = ADDED if fill_in_the_middle else 0
        window = self.sequence_length - added
        if window < 1:
            raise ValueError(f"sequence_length={sequence_length} must be above the {added} marks")
        pieces = _windows(document_bounds(indexed), self._documents, window)
        if not len(pieces.lengths):
            raise ValueError(f"{indexed.prefix}: split {self.split.name!r} must hold a token")
        bins = best_fit_decreasing(pieces.lengths + added, self.sequence_length)
        self._pack(pieces, bins, num_samples)

    @property
    def _facts(self) -> dict[str, Any]:
        middle = self.fill_in_the_middle
        return {"packed": "best fit decreasing", "middle": asdict(middle) if middle else None}

    def _spans(self, samples: np.ndarray, nth: np.ndarray, items: np.ndarray) -> np.ndarray:
        return self._pieces.lengths[items] + ADDED * self._rearranged(samples, nth)

    def _loss(self, samples: np.ndarray, layout: Layout) -> np.ndarray:
        moved = self._rearranged(samples[layout.rows], layout.nth)
        return np.where(moved, layout.spans - 1, self._pieces.labels[layout.items])

    def _rearranged(self, samples: np.ndarray, nth: np.ndarray) -> np.ndarray:
        if self.fill_in_the_middle is None:
            return np.zeros(len(nth), bool)
        return self.fill_in_the_middle.applies(samples, nth)

    def _fill(self, samples: np.ndarray, layout: Layout, into: Filled) -> None:
        super()._fill(samples, layout, into)
        middle = self.fill_in_the_middle
        if middle is None:
            return
        for at in np.flatnonzero(self._rearranged(samples[layout.rows], layout.nth)).tolist():
            start, span = int(layout.places[at]), int(layout.spans[at])
            stop = start + span
            sample, nth = int(samples[layout.rows[at]]), int(layout.nth[at])
            given = into.tokens[start : stop - ADDED]
            into.tokens[start:stop] = middle.tokens(given, sample, nth)
            into.labels[start : stop - 1] = into.tokens[start + 1 : stop]
            into.labels[stop - 1] = 0
            into.loss_mask[start : stop - 1], into.loss_mask[stop - 1] = 1, 0


def _windows(bounds: np.ndarray, documents: np.ndarray, window: int) -> Pieces:
    """The windows of each document, and its rest."""
    begins, sizes = bounds[documents], bounds[documents + 1] - bounds[documents]
    counts = -(-sizes // window)
    of = np.arange(len(documents)).repeat(counts)
    offsets = ranges(np.zeros_like(counts), counts) * window
    lengths = np.minimum(sizes[of] - offsets, window)
    followed = offsets + lengths < sizes[of]
    starts = begins[of] + offsets
    return Pieces(documents[of], offsets, starts, lengths, lengths - 1 + followed)
