"""Which source of a blend gives a sample, and which of its samples: arithmetic, no index.

Dimensions: D sources, B samples.
"""

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from math import lcm
from typing import NamedTuple

import numpy as np

from megablocks_core.data.permutation import Permutation

BLOCK = 64  # samples whose sources are shuffled among each other
TABLES = 16  # blocks whose sources are kept


class Shares:
    """Deals samples to sources in proportion to ``weights``; any number of samples at once.

    The sources are halved until each stands alone. Of ``n`` samples a half gets ``n`` times its
    share, rounded half up, and the other half the rest. Both numbers only grow with ``n``, so
    counts never fall, they add up to ``n``, and each stays within ``(1 + log2 D) / 2`` of its
    exact share. Where all shares are whole numbers they are met exactly. Weights are taken as
    exact fractions, so every machine agrees.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        fractions = [Fraction(weight) for weight in weights]
        scale = lcm(*(fraction.denominator for fraction in fractions))
        self._sums = list(accumulate((int(f * scale) for f in fractions), initial=0))

    def counts(self, num_samples: int) -> np.ndarray:
        """Return how many of the first samples each source gives, [D] int64."""
        counts = np.zeros(len(self._sums) - 1, np.int64)
        waiting = [(0, len(counts), num_samples)]
        while waiting:
            first, last, number = waiting.pop()
            if last - first == 1:
                counts[first] = number
                continue
            middle = (first + last) // 2
            whole = self._sums[last] - self._sums[first]
            half = self._sums[middle] - self._sums[first]
            left = (2 * number * half + whole) // (2 * whole) if whole else 0
            waiting += [(first, middle, left), (middle, last, number - left)]
        return counts


class Segment(NamedTuple):
    """A stretch of a run with one set of weights."""

    start: int  # sample at which it begins
    sources: np.ndarray  # those with a weight, in the order of all sources
    shares: Shares
    before: np.ndarray  # [D] samples that each source gave before it


class _Table(NamedTuple):
    sources: np.ndarray  # [block] source of each sample
    indices: np.ndarray  # [block] which sample of its source


class Mixture:
    """The order of a blend: the sources of each block of 64 samples are shuffled by arithmetic.

    The number of samples that each source gives to a block is fixed by its ``Shares``, so any
    stretch of a run has the mixture that was asked for; the order inside a block is a
    ``Permutation`` of ``(seed, block)``. The samples of a source come in its own order, none twice
    and none left out, wherever the run stops or the weights change. ``stop`` ends the last block
    early, where a blend uses up every source.

    A sample costs nothing but its block's table, of which a few are kept.
    """

    def __init__(
        self,
        num_sources: int,
        segments: Sequence[tuple[int, Sequence[float]]],
        *,
        seed: int,
        stop: int | None = None,
    ) -> None:
        self.seed, self.stop = seed, stop
        self._segments: list[Segment] = []
        self._tables: dict[tuple[int, int], _Table] = {}
        before = np.zeros(num_sources, np.int64)
        for start, weights in segments:
            if self._segments:
                before = self.counts(start)
            sources = np.flatnonzero(np.asarray(weights) > 0)
            shares = Shares([weights[source] for source in sources.tolist()])
            self._segments.append(Segment(start, sources, shares, before))

    def counts(self, num_samples: int) -> np.ndarray:
        """Return how many of the first samples each source gives, [D] int64."""
        segment = self._segments[self._segment_of(max(0, num_samples - 1))]
        whole, rest = divmod(num_samples - segment.start, BLOCK)
        counts = segment.before.copy()
        counts[segment.sources] += segment.shares.counts(whole * BLOCK)
        if rest:
            table = self._table(segment, whole)
            counts += np.bincount(table.sources[:rest], minlength=len(counts))
        return counts

    def find(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each sample and which of the source's samples it is, both [B]."""
        sources, indices = np.empty((2, len(samples)), np.int64)
        starts = np.array([segment.start for segment in self._segments])
        number = starts.searchsorted(samples, side="right") - 1
        blocks, places = np.divmod(samples - starts[number], BLOCK)
        for now in set(zip(number.tolist(), blocks.tolist(), strict=True)):
            chosen = (number == now[0]) & (blocks == now[1])
            table = self._table(self._segments[now[0]], now[1])
            sources[chosen] = table.sources[places[chosen]]
            indices[chosen] = table.indices[places[chosen]]
        return sources, indices

    def _segment_of(self, sample: int) -> int:
        later = (number for number, s in enumerate(self._segments) if s.start > sample)
        return next(later, len(self._segments)) - 1

    def _table(self, segment: Segment, block: int) -> _Table:
        key, tables = (segment.start, block), self._tables
        if key not in tables:
            first = block * BLOCK
            size = BLOCK
            if self.stop is not None:
                size = min(BLOCK, self.stop - segment.start - first)
            before = segment.shares.counts(first)
            given = segment.shares.counts(first + size) - before
            # Places of a segment are told apart by its start, those of two seeds by the seed.
            order = Permutation(size, seed=self.seed, epoch=segment.start + first)(np.arange(size))
            local = np.arange(len(given)).repeat(given)[order]
            by_source = local.argsort(kind="stable")
            ranks = np.empty(size, np.int64)
            ranks[by_source] = np.arange(size) - (given.cumsum() - given).repeat(given)
            sources = segment.sources[local]
            indices = segment.before[sources] + before[local] + ranks
            kept = {} if len(tables) >= TABLES else tables
            # Replaced, never changed: threads that read the old one are not disturbed.
            self._tables = tables = kept | {key: _Table(sources, indices)}
        return tables[key]
