"""Conversations packed into samples of one length: first fit, the longest first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megablocks_core.data.indexed import IndexedDataset
from megablocks_core.data.instructions.learnt import (
    document_bounds,
    loss_counts,
    masks,
    ranges,
    refuse_other_modes,
)
from megablocks_core.data.instructions.packed import BinnedSamples, Filled, Layout, Pieces
from megablocks_core.data.packing import first_fit_decreasing
from megablocks_core.data.split import Split

TRUNCATE, DROP = "truncate", "drop"
TOO_LONG = (TRUNCATE, DROP)


@dataclass(frozen=True)
class PackingReport:
    """What became of the conversations.

    Attributes:
        conversations: That are in the samples of an epoch, each once.
        samples: Of an epoch.
        tokens: Of the conversations, as far as they are kept.
        lower_bound: Samples that so many tokens need at least.
        truncated: Conversations that lost their end.
        tokens_cut: Tokens of these ends.
        dropped: Conversations left out because they are too long.
        unlearnt: Left out because nothing that is kept of them is to be learnt.
    """

    conversations: int
    samples: int
    tokens: int
    lower_bound: int
    truncated: int
    tokens_cut: int
    dropped: int
    unlearnt: int


class PackedConversations(BinnedSamples):
    """Samples of ``sequence_length`` tokens, each of whole conversations laid end to end.

    The conversations of ``split`` (by default all) are packed once by first fit, the longest first
    (``first_fit_decreasing``); samples are these packs. An epoch has each once, in an
    order of its own that ``seed`` chooses, and the only state is the number of samples consumed.
    ``num_samples`` is the length of the dataset, by default one epoch.

    Of each conversation the tokens in sequences of mode 1 are learnt, as ``prepare_conversations``
    writes them; in a dataset without modes all are. The label of its last token is ignored: no
    label crosses to another conversation. One of more than S tokens is cut at its end, or left
    out with ``too_long="drop"``; one that keeps nothing to learn is left out. ``report`` counts
    them all.

    Shapes: ``tokens``, ``labels``, ``position_ids`` [S] int64, ``loss_mask`` [S] float32,
    ``cu_seqlens`` [conversations + 1] int64, with one more document where a sample is filled up
    with 0 at its end, without loss. Takes 64 bytes of memory a conversation.

    Sends nothing; every rank computes any sample for itself.

    Raises:
        ValueError: Nothing is left to pack, modes other than 0 and 1, tokens that are not integers.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        sequence_length: int,
        *,
        seed: int,
        too_long: str = TRUNCATE,
        split: Split | None = None,
        num_samples: int | None = None,
    ) -> None:
        super().__init__(indexed, sequence_length, seed=seed, split=split)
        if too_long not in TOO_LONG:
            raise ValueError(f"too_long={too_long!r} must be one of {', '.join(TOO_LONG)}")
        refuse_other_modes(indexed)
        self.too_long = too_long
        bounds = document_bounds(indexed)
        whole = np.diff(bounds)
        kept = np.minimum(whole, self.sequence_length)
        loss = loss_counts(indexed, kept)[self._documents]
        lengths, kept = whole[self._documents], kept[self._documents]
        long = lengths > self.sequence_length
        in_time = ~long if too_long == DROP else np.ones_like(long)
        chosen = np.flatnonzero(in_time & (loss > 0))
        if not len(chosen):
            raise ValueError(
                f"{indexed.prefix}: split {self.split.name!r} of {len(lengths)} conversations must "
                f"hold one with something to learn in sequence_length={self.sequence_length}"
            )
        documents, kept_length = self._documents[chosen], kept[chosen]
        pieces = Pieces(
            documents, np.zeros_like(documents), bounds[documents], kept_length, kept_length - 1
        )
        self._loss_of = loss[chosen]
        self._pack(pieces, first_fit_decreasing(kept_length, self.sequence_length), num_samples)
        tokens = int(kept_length.sum())
        self.report = PackingReport(
            conversations=len(chosen),
            samples=self.samples_per_epoch,
            tokens=tokens,
            lower_bound=-(-tokens // self.sequence_length),
            truncated=int(long[chosen].sum()),
            tokens_cut=int((lengths - kept)[chosen].sum()),
            dropped=int((~in_time).sum()),
            unlearnt=int((in_time & (loss == 0)).sum()),
        )

    @property
    def _facts(self) -> dict[str, Any]:
        return {"packed": "first fit decreasing", "too_long": self.too_long}

    def _loss(self, samples: np.ndarray, layout: Layout) -> np.ndarray:
        return self._loss_of[layout.items]

    def _fill(self, samples: np.ndarray, layout: Layout, into: Filled) -> None:
        super()._fill(samples, layout, into)
        pieces, items = self._pieces, layout.items
        lengths = pieces.lengths[items]
        learnt = masks(self.indexed, pieces.documents[items], lengths)
        before = np.cumsum(lengths) - lengths
        at = ranges(layout.places, lengths - 1)
        into.loss_mask[at] = learnt[ranges(before + 1, lengths - 1)]
