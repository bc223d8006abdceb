"""Documents cut into powers of two, so that each step has sequences of one length."""

from __future__ import annotations

from typing import Any

import numpy as np

from megablocks_core.data.checks import whole_number
from megablocks_core.data.epoch_order import EpochOrder
from megablocks_core.data.indexed import IndexedDataset
from megablocks_core.data.instructions.curricula import length_curriculum
from megablocks_core.data.instructions.learnt import document_bounds
from megablocks_core.data.instructions.packed import Layout, PackedSamples, Pieces
from megablocks_core.data.permutation import GOLDEN, WORD, mix
from megablocks_core.data.split import Split


class DecomposedDocuments(PackedSamples):
    """Samples of ``sequence_length`` tokens made of pieces of one length, each of one document.

    A document is cut, from its beginning, into as many pieces of S tokens as it has, and one for
    each lower power of two that its length holds, the longest first, down to ``shortest``; fewer
    tokens than that at its end are left out. A sample is S / L pieces of length L; the
    ``global_batch_size`` samples of a step all have the same L, which ``length_curriculum(kind,
    ...)`` chooses. So each step has as many tokens, attention sees no more than a document, and
    nothing is filled up.

    An epoch has as many whole steps of each length as its pieces give, in another order each
    time; the few pieces over are others in the next epoch. The only state is the number of
    samples consumed. ``steps`` is how many steps of each length an epoch has,
    ``tokens_left_out`` how many tokens are in none of its samples.

    Shapes: as those of ``PackedConversations``. Takes 48 bytes of memory a piece.

    Sends nothing; every rank computes any sample for itself.

    Raises:
        ValueError: Lengths that are no powers of two, too few tokens for one step.

    Source: H. Pouransari et al., Dataset decomposition (2024), section 2.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        sequence_length: int,
        *,
        shortest: int,
        global_batch_size: int,
        kind: str,
        seed: int,
        cycles: int = 1,
        split: Split | None = None,
        num_samples: int | None = None,
    ) -> None:
        super().__init__(indexed, sequence_length, seed=seed, split=split)
        self.shortest = whole_number("shortest", shortest, 1, self.sequence_length)
        for name, length in (("sequence_length", sequence_length), ("shortest", shortest)):
            if length & (length - 1):
                raise ValueError(f"{name}={length} must be a power of two")
        self.global_batch_size = whole_number("global_batch_size", global_batch_size, 1)
        self.kind, self.cycles = kind, whole_number("cycles", cycles, 1)
        bounds = document_bounds(indexed)
        self._cut = _powers(bounds, self._documents, self.sequence_length, self.shortest)
        numbers = np.argsort(self._cut.lengths, kind="stable")
        lengths, firsts = np.unique(self._cut.lengths[numbers], return_index=True)
        ends = [*firsts.tolist(), len(numbers)][1:]
        self._numbers = {
            length: numbers[first:end]
            for length, first, end in zip(lengths.tolist(), firsts.tolist(), ends, strict=True)
        }
        step = self.sequence_length * self.global_batch_size
        counts = {length: len(of) * length // step for length, of in self._numbers.items()}
        self.steps = {length: count for length, count in counts.items() if count}
        if not self.steps:
            raise ValueError(
                f"{indexed.prefix}: split {self.split.name!r} must hold the {step} tokens of a "
                f"step in documents of at least {shortest}"
            )
        self._orders = {
            length: EpochOrder(len(self._numbers[length]), seed=self.seed) for length in self.steps
        }
        self._epoch = (-1, np.empty(0, np.int64), np.empty(0, np.int64))
        self._curriculum(0)  # refuses an unknown kind
        self.samples_per_epoch = self.global_batch_size * sum(self.steps.values())
        whole = int((bounds[self._documents + 1] - bounds[self._documents]).sum())
        self.tokens_left_out = whole - self.samples_per_epoch * self.sequence_length
        self._length = self.samples_per_epoch
        if num_samples is not None:
            self._length = whole_number("num_samples", num_samples, 1)

    @property
    def _facts(self) -> dict[str, Any]:
        return {
            "packed": "powers of two",
            "shortest": self.shortest,
            "global_batch_size": self.global_batch_size,
            "kind": self.kind,
            "cycles": self.cycles,
        }

    @property
    def _pieces(self) -> Pieces:
        return self._cut

    def _items(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        items, counts = [np.empty(0, np.int64)], []
        for sample in samples.tolist():
            epoch, place = divmod(sample, self.samples_per_epoch)
            step, row = divmod(place, self.global_batch_size)
            lengths, before = self._curriculum(epoch)
            length = int(lengths[step])
            count = self.sequence_length // length
            first = (int(before[step]) * self.global_batch_size + row) * count
            order, numbers = self._orders[length], self._numbers[length]
            items.append(numbers[order(epoch * order.size + first + np.arange(count))])
            counts.append(count)
        return np.concatenate(items), np.array(counts, np.int64)

    def _loss(self, samples: np.ndarray, layout: Layout) -> np.ndarray:
        return self._cut.labels[layout.items]

    def _curriculum(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The length of each step of an epoch, and at how many steps before it came already."""
        held = self._epoch
        if held[0] != epoch:
            seed = mix(self.seed ^ mix(epoch + GOLDEN & WORD))
            lengths = length_curriculum(self.kind, self.steps, seed=seed, cycles=self.cycles)
            before = np.empty_like(lengths)
            for length in self.steps:
                now = np.flatnonzero(lengths == length)
                before[now] = np.arange(len(now))
            held = self._epoch = (epoch, lengths, before)
        return held[1], held[2]


def _powers(bounds: np.ndarray, documents: np.ndarray, longest: int, shortest: int) -> Pieces:
    """The pieces of each document, in the order of their lengths and then of documents."""
    begins, sizes = bounds[documents], bounds[documents + 1] - bounds[documents]
    whole = sizes // longest
    of = np.arange(len(documents)).repeat(whole)
    nth = np.arange(len(of)) - (np.cumsum(whole) - whole)[of]
    found = [(of, nth * longest, np.full(len(of), longest))]
    rest, length = sizes % longest, longest // 2
    while length >= shortest:
        having = np.flatnonzero(rest & length)
        offsets = sizes[having] - (rest[having] & (2 * length - 1))
        found.append((having, offsets, np.full(len(having), length)))
        length //= 2
    of, offsets, lengths = (np.concatenate(column) for column in zip(*found, strict=True))
    followed = offsets + lengths < sizes[of]
    return Pieces(documents[of], offsets, begins[of] + offsets, lengths, lengths - 1 + followed)
