"""Pairs of answers to one prompt, of which one is preferred."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from megablocks_core.data.checks import whole_number
from megablocks_core.data.collate import host_and_device
from megablocks_core.data.epoch_order import EpochOrder
from megablocks_core.data.fingerprint import facts_of_split, fingerprint
from megablocks_core.data.indexed import IndexedDataset
from megablocks_core.data.instructions.conversations import DROP, TOO_LONG, TRUNCATE
from megablocks_core.data.instructions.learnt import (
    document_bounds,
    loss_counts,
    masks,
    ranges,
    refuse_other_modes,
)
from megablocks_core.data.place import Place
from megablocks_core.data.samples import IndexedSamples
from megablocks_core.data.split import Split, checked_documents

SPOTS = 64
BORDER = 8  # ids at a prompt's end that may be others before another answer


@dataclass(frozen=True)
class PairsReport:
    """What became of the pairs.

    Attributes:
        pairs: Of an epoch.
        truncated: Of them, those with an answer that lost its end.
        dropped: Left out because an answer is too long.
        unlearnt: Left out because an answer keeps nothing to learn.
    """

    pairs: int
    truncated: int
    dropped: int
    unlearnt: int


class PreferencePairs(IndexedSamples):
    """Pairs as ``prepare_preferences`` writes them: a sample is the chosen, then the rejected.

    A batch of B pairs holds 2 B documents end to end, without filling: document ``2 i`` is the
    chosen answer of pair ``i``, ``2 i + 1`` the other, each with the whole prompt before
    it. ``loss_mask`` is 1 where the label is a token of an answer, so the sum of the log
    probabilities of an answer is one sum between two entries of ``cu_seqlens``.

    With ``max_length``, an answer with its prompt is cut at its end, or the pair is left
    out with ``too_long="drop"``; a pair of which one answer keeps nothing to learn is left out.
    ``report`` counts all. ``split`` holds numbers of pairs, such as those of
    ``split_documents(indexed.num_documents // 2, "9,1")``. The order is seeded, each epoch has its
    own, and the only state is the number of samples consumed; ``num_samples`` is the length, by
    default one epoch.

    Shapes: of a batch ``tokens``, ``labels``, ``position_ids`` [1 T] int64, ``loss_mask`` [1 T]
    float32, ``cu_seqlens`` [2 B + 1] int64, the same as the list ``cu_seqlens_host``, the int
    ``max_seqlen``; ``sample_ids`` [B] and ``document_ids`` [2 B]. A ``Loader`` takes it.

    Sends nothing.

    Raises:
        ValueError: An odd number of documents, or neighbours with different prompts (of 64 pairs
            that are looked at), no pair that is left, modes other than 0 and 1.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        *,
        seed: int,
        max_length: int | None = None,
        too_long: str = TRUNCATE,
        split: Split | None = None,
        num_samples: int | None = None,
    ) -> None:
        super().__init__(indexed, seed=seed, split=split, of=2)
        if indexed.num_documents % 2:
            raise ValueError(
                f"{indexed.prefix}: {indexed.num_documents} documents must be pairs, as "
                f"prepare_preferences() writes them"
            )
        if too_long not in TOO_LONG:
            raise ValueError(f"too_long={too_long!r} must be one of {', '.join(TOO_LONG)}")
        refuse_other_modes(indexed)
        self.too_long = too_long
        self.max_length = None if max_length is None else whole_number("max_length", max_length, 1)
        numbers = checked_documents(self.split, indexed.num_documents // 2)
        numbers = np.asarray(numbers, np.int64)
        self._bounds = document_bounds(indexed)
        self._refuse_strangers(numbers)
        whole = np.diff(self._bounds)
        most = max_length or int(whole.max(initial=0))
        self._kept = np.minimum(whole, most)
        loss = loss_counts(indexed, self._kept).reshape(-1, 2)
        long = np.any((whole > most).reshape(-1, 2)[numbers], axis=1)
        in_time = ~long if too_long == DROP else np.ones_like(long)
        learnt = np.all(loss[numbers] > 0, axis=1)
        kept = np.flatnonzero(in_time & learnt)
        self._chosen = numbers[kept]
        if not len(self._chosen):
            raise ValueError(f"{indexed.prefix}: must hold a pair with something to learn")
        self._loss_of = loss.sum(1)
        self.samples_per_epoch = len(self._chosen)
        self._order = EpochOrder(self.samples_per_epoch, seed=self.seed)
        self._length = self.samples_per_epoch
        if num_samples is not None:
            self._length = whole_number("num_samples", num_samples, 1)
        self.report = PairsReport(
            pairs=len(self._chosen),
            truncated=int(long[kept].sum()),
            dropped=int((~in_time).sum()),
            unlearnt=int((in_time & ~learnt).sum()),
        )

    @cached_property
    def fingerprint(self) -> str:
        """What changes with the order or the tokens, and not with the number of samples."""
        facts: dict[str, Any] = {
            "max_length": self.max_length,
            "too_long": self.too_long,
            "seed": self.seed,
        }
        facts["split"] = facts_of_split(self.split)
        return fingerprint(tokens=self.indexed.fingerprint, pairs=True, **facts)

    def batch(self, samples: Sequence[int] | np.ndarray) -> dict[str, Any]:
        """Return pairs laid end to end."""
        ids = self._checked(samples)
        documents = (self._pairs(ids)[:, None] * 2 + np.arange(2)).ravel()
        starts, lengths = self._bounds[documents], self._kept[documents]
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
        tokens_T = self._read(starts, lengths)
        labels_T, loss_mask_T = np.zeros_like(tokens_T), np.zeros(len(tokens_T), np.float32)
        labelled = ranges(cu_seqlens[:-1], lengths - 1)
        labels_T[labelled] = tokens_T[labelled + 1]
        loss_mask_T[labelled] = masks(self.indexed, documents, lengths)[labelled + 1]
        positions_T = ranges(np.zeros_like(lengths), lengths)
        return {
            "tokens": tokens_T[None],
            "labels": labels_T[None],
            "loss_mask": loss_mask_T[None],
            "position_ids": positions_T[None],
            **host_and_device(cu_seqlens),
            "sample_ids": ids,
            "document_ids": (ids[:, None] * 2 + np.arange(2)).ravel(),
        }

    def num_loss_tokens(self, samples: Sequence[int] | np.ndarray) -> int:
        """Return the sum of the loss masks of some pairs, without reading a token."""
        return int(self._loss_of[self._pairs(self._checked(samples))].sum())

    def locate(self, sample: int) -> Place:
        """Return the two documents of a sample, and how much of them is kept."""
        first = 2 * int(self._pairs(self._checked([sample]))[0])
        return Place(
            self.split.name, [(each, 0, int(self._kept[each])) for each in (first, first + 1)]
        )

    def _refuse_strangers(self, numbers: np.ndarray) -> None:
        """Refuse documents that were split or shuffled one by one since they were pairs."""
        if self.indexed.sequence_modes is None or not len(numbers):
            return
        for pair in numbers[np.linspace(0, len(numbers) - 1, SPOTS).astype(np.int64)].tolist():
            firsts = [int(self.indexed.document_indices[2 * pair + end]) for end in (0, 1, 2)]
            if firsts[0] == firsts[1] or firsts[1] == firsts[2]:
                continue
            prompts = [self.indexed[first] for first in firsts[:2]]
            given = [not self.indexed.sequence_modes[first] for first in firsts[:2]]
            shared = min(map(len, prompts)) - BORDER
            if all(given) and shared > 0 and (prompts[0][:shared] != prompts[1][:shared]).any():
                raise ValueError(
                    f"{self.indexed.prefix}: documents {2 * pair} and {2 * pair + 1} begin with "
                    f"different prompts, must be a pair as prepare_preferences() writes them"
                )

    def _pairs(self, samples: np.ndarray) -> np.ndarray:
        return self._chosen[self._order(samples)]
