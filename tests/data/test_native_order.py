"""Each epoch has every window once, and orders of epochs have nothing in common."""

import numpy as np
import pytest

from megablocks_core.data import Split
from megablocks_core.data.native_order import NativeOrder


def order(indexed, length=4, **options):
    split = Split("all", range(indexed.num_documents))
    return NativeOrder(indexed, length, **{"seed": 1, "split": split, **options})


@pytest.mark.parametrize("samples", [1, 2, 5, 8, 24, 100, 1000])
def test_an_epoch_has_every_window_once(stream, samples):
    windows = order(stream([4 * samples + 3]))
    assert windows.samples_per_epoch == samples
    for epoch in range(3):
        starts = windows.starts(epoch * samples + np.arange(samples))
        assert sorted(starts.tolist()) == list(range(0, 4 * samples, 4))


def test_samples_of_several_epochs_at_once_are_those_of_each(stream):
    indexed = stream([41])
    wanted = np.array([25, 3, 9, 10, 11, 3, 29, 0])
    together = order(indexed).starts(wanted)
    assert together.tolist() == [int(order(indexed).starts(wanted[[k]])[0]) for k in range(8)]


def test_far_samples_need_no_epoch_before_them(stream):
    last = np.array([2**62])
    assert order(stream([41])).starts(last)[0] in range(0, 40, 4)


@pytest.mark.parametrize("shift", ["epoch", "seed", "size"])
def test_orders_are_uncorrelated(stream, shift):
    """The windows at equal places of two orders: as close as chance, within 4 sigma."""
    size = 2000
    one = order(stream([4 * size + 1]))
    first = one.starts(np.arange(size)) / (4 * size)
    if shift == "epoch":
        second = one.starts(size + np.arange(size)) / (4 * size)
    elif shift == "seed":
        second = order(stream([4 * size + 1]), seed=2).starts(np.arange(size)) / (4 * size)
    else:
        second = order(stream([4 * size + 5])).starts(np.arange(size)) / (4 * size)
    correlation = np.corrcoef(first, second)[0, 1]
    assert abs(correlation) <= 4 / np.sqrt(size)
    equal = (first == second).sum()
    assert equal <= 1 + 4


def test_parts_hold_the_label_after_the_last_input(stream):
    parts = order(stream([3, 6, 4]), 5).parts(np.arange(2))
    assert np.bincount(parts.windows, parts.lengths).tolist() == [6, 6]
    found = set(zip(parts.starts.tolist(), parts.documents.tolist(), strict=True))
    assert found == {(0, 0), (3, 1), (5, 1), (9, 2)}
