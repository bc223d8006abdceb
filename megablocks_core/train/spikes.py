"""What a spike is: the one rule of guards, which stop it, and of reports, which show it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy


class Usual(NamedTuple):
    """What values have been, and what they may be without standing out."""

    median: float
    most: float


def usual(past: Sequence[float], *, threshold: float) -> Usual:
    """What the next value may be after ``past``, which holds finite values and at least one.

    A spike is more than ``threshold`` spreads above the median. A spread is 1.4826 median
    absolute deviations (a standard deviation of normal noise; a few spikes in the past do not
    widen it), and at least 1% of the median, so that a still past makes no spikes.
    """
    values = numpy.array(past)
    median = float(numpy.median(values))
    spread = 1.4826 * float(numpy.median(numpy.abs(values - median)))
    return Usual(median, median + threshold * max(spread, 0.01 * abs(median)))
