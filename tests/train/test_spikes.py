"""A spike is the same to a guard, which stops it, and to a report, which shows it."""

import math
import random

import pytest

from megablocks_core.train import SpikeGuard
from megablocks_core.train.figures import anomalies
from megablocks_core.train.spikes import usual


def test_the_bound_is_that_of_normal_noise():
    noise = random.Random(0)
    past = [noise.gauss(2.0, 0.1) for _ in range(2000)]
    found = usual(past, threshold=5.0)
    assert found.median == pytest.approx(2.0, abs=0.01)
    assert found.most == pytest.approx(2.5, abs=0.03)


def test_earlier_spikes_do_not_hide_the_next_one():
    """They would widen a standard deviation: 9 after 60 values of 1 and three of 9."""
    past = [1.0, 1.1] * 30 + [9.0] * 3
    assert usual(past, threshold=6.0).most < 2


@pytest.mark.parametrize(("value", "most"), [(2.0, 2.12), (-2.0, -1.88), (0.0, 0.0)])
def test_a_still_past_allows_a_little(value, most):
    assert usual([value], threshold=6.0) == (value, pytest.approx(most))


def test_a_guard_and_a_report_find_the_same_spikes():
    noise = random.Random(1)
    values = [2.0 + noise.gauss(0.0, 0.05) for _ in range(300)]
    for place, height in ((100, 2.4), (150, 2.2), (200, 9.0), (220, math.nan), (250, 1.0)):
        values[place] = height
    guard = SpikeGuard(window=50, threshold=6.0)
    refused = [place for place, value in enumerate(values) if not guard({"loss": value})]
    assert refused == anomalies(values, window=50, threshold=6.0) == [100, 200, 220]
