"""Items go, longest first, into the first bin with room; natively as in NumPy as by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.data import best_fit_decreasing, first_fit_decreasing, packing

BOTH = pytest.mark.parametrize("native", [True, False], ids=["native", "numpy"])


def contents(bins):
    bounds = bins.bounds.tolist()
    items = bins.items.tolist()
    return [items[a:b] for a, b in zip(bounds[:-1], bounds[1:], strict=True)]


def plain_pack(lengths, capacity):
    bins = []
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        loads = [sum(lengths[i] for i in held) for held in bins]
        fitting = (
            held for held, load in zip(bins, loads, strict=True) if load + lengths[item] <= capacity
        )
        held = next(fitting, None)
        if held is None:
            bins.append([item])
        else:
            held.append(item)
    return bins


@BOTH
def test_equals_a_plain_loop(native):
    @given(lengths=st.lists(st.integers(0, 20), max_size=40), spare=st.integers(0, 20))
    def check(lengths, spare):
        capacity = max(lengths, default=1) + spare
        with pytest.MonkeyPatch.context() as patch:
            if not native:
                patch.setattr(packing, "_native", None)
            bins = first_fit_decreasing(lengths, capacity)
        assert contents(bins) == plain_pack(lengths, capacity)
        assert bins.items.dtype == bins.bounds.dtype == np.int64

    check()


def test_both_ways_agree_on_many_items(monkeypatch):
    lengths = np.random.default_rng(0).integers(1, 4097, 20_000)
    native = first_fit_decreasing(lengths, 4096)
    monkeypatch.setattr(packing, "_native", None)
    twin = first_fit_decreasing(lengths.astype(np.uint16), 4096)
    assert all(np.array_equal(a, b) for a, b in zip(native, twin, strict=True))
    assert np.array_equal(np.sort(native.items), np.arange(20_000))
    loads = np.add.reduceat(lengths[native.items], native.bounds[:-1])
    assert loads.max() <= 4096
    assert len(loads) <= 11 / 9 * -(-lengths.sum() // 4096) + 6 / 9


@BOTH
@pytest.mark.parametrize(
    ("lengths", "capacity", "message"),
    [
        ([3, 5], 4, r"lengths\[1\]=5 must be between 0 and capacity=4"),
        ([3, -1], 4, r"lengths\[1\]=-1 must be between 0 and"),
        ([0], -1, "capacity=-1 must be at least 0"),
        ([3.0], 4, "lengths=.* must be one row of whole numbers"),
        ([[3]], 4, "lengths=.* must be one row of whole numbers"),
    ],
)
def test_bad_input_is_named(monkeypatch, native, lengths, capacity, message):
    if not native:
        monkeypatch.setattr(packing, "_native", None)
    with pytest.raises(ValueError, match=message):
        first_fit_decreasing(lengths, capacity)


@given(lengths=st.lists(st.integers(0, 20), max_size=40), spare=st.integers(0, 20))
def test_best_fit_equals_a_plain_loop(lengths, spare):
    capacity = max(lengths, default=1) + spare
    bins, used = [], []  # ``used``: bins in the order in which they were put into
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        room = {n: capacity - sum(lengths[i] for i in held) for n, held in enumerate(bins)}
        fitting = [n for n in used if room[n] >= lengths[item]]
        least = min((room[n] for n in fitting), default=None)
        if least is None:
            bins.append([item])
            chosen = len(bins) - 1
        else:
            chosen = [n for n in fitting if room[n] == least][-1]
            bins[chosen].append(item)
        used = [n for n in used if n != chosen] + [chosen]
    assert contents(best_fit_decreasing(lengths, capacity)) == bins


def test_best_fit_of_a_lognormal_mix_is_within_two_hundredths_of_the_fewest():
    lengths = np.exp(np.random.default_rng(0).normal(6.0, 1.0, 20_000)).astype(int).clip(1, 8192)
    bins = best_fit_decreasing(lengths, 8192)
    loads = np.add.reduceat(lengths[bins.items], bins.bounds[:-1])
    assert loads.max() <= 8192
    assert len(loads) <= 1.02 * -(-lengths.sum() // 8192)


def test_best_fit_names_bad_input():
    with pytest.raises(ValueError, match=r"lengths\[1\]=5 must be between 0 and capacity=4"):
        best_fit_decreasing([3, 5], 4)
