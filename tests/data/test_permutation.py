"""The shuffled order is a bijection, the same everywhere, and looks like chance."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.data import Permutation

SIZES = [5, 8, 24, 100, 1000, 10**6 + 3]


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 2**64 - 1))
def test_is_a_bijection(size, seed, epoch):
    order = Permutation(size, seed=seed, epoch=epoch)(np.arange(size))
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(size))


@given(size=st.integers(1, 2**63), seed=st.integers(0, 2**64 - 1), data=st.data())
def test_one_place_equals_many_at_any_size(size, seed, data):
    places = data.draw(st.lists(st.integers(0, size - 1), max_size=20))
    permutation = Permutation(size, seed=seed, epoch=3)
    elements = permutation(np.array(places, np.int64))
    assert elements.tolist() == [permutation(place) for place in places]
    assert all(0 <= element < size for element in elements.tolist())
    assert len(set(elements.tolist())) == len(set(places))


def test_the_order_never_changes():
    """Stored data orders depend on these values, on every machine and in every version."""
    assert Permutation(10, seed=0)(np.arange(10)).tolist() == [6, 5, 1, 0, 4, 8, 9, 2, 7, 3]
    assert Permutation(2**63, seed=2**64 - 1, epoch=7)(2**63 - 1) == 3536539113264791028
    assert Permutation(1024, seed=1, epoch=2)(np.arange(6).reshape(2, 3)).tolist() == [
        [634, 1021, 29],
        [664, 789, 226],
    ]


def test_all_permutations_of_a_few_elements_are_equally_likely():
    codes = {order: code for code, order in enumerate(permutations(range(4)))}
    drawn = [codes[tuple(Permutation(4, seed=seed)(np.arange(4)).tolist())] for seed in range(4800)]
    assert _sigmas(np.bincount(drawn, minlength=24)) < 4


@pytest.mark.parametrize("size", SIZES)
def test_every_place_holds_every_element_equally_often_over_seeds_and_epochs(size):
    bins = min(size, 50)
    for place in (0, size // 2, size - 1):
        seeds = [Permutation(size, seed=seed)(place) for seed in range(1000)]
        epochs = [Permutation(size, seed=1, epoch=epoch)(place) for epoch in range(1000)]
        for elements in (seeds, epochs):
            counts = np.bincount(np.array(elements) * bins // size, minlength=bins)
            assert _sigmas(counts, _bin_sizes(size, bins)) < 4


@pytest.mark.parametrize("size", SIZES)
def test_neighbours_are_unrelated(size):
    seeds = range(min(400, max(1, 10**5 // size)))
    orders = [Permutation(size, seed=seed)(np.arange(size)) for seed in seeds]
    steps = np.concatenate([np.diff(order) % size for order in orders]) - 1
    bins = min(size - 1, 1000)
    counts = np.bincount(steps * bins // (size - 1), minlength=bins)
    assert _sigmas(counts, _bin_sizes(size - 1, bins)) < 4


def test_epochs_seeds_and_sizes_have_unrelated_orders():
    orders = [
        Permutation(size, seed=seed, epoch=epoch)(np.arange(1000))
        for size in (1000, 1001)
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert abs(np.corrcoef(one, other)[0, 1]) < 4 / 1000**0.5
            assert (one == other).sum() < 8


@pytest.mark.parametrize(
    ("name", "value"), [("size", 0), ("size", 2**63 + 1), ("seed", -1), ("epoch", 2**64)]
)
def test_arguments_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}={value} must be between"):
        Permutation(**{"size": 5, "seed": 0, name: value})


def test_places_out_of_range_are_refused():
    permutation = Permutation(5, seed=0)
    for place in (-1, 5):
        with pytest.raises(IndexError, match="permutation of 5"):
            permutation(place)
        with pytest.raises(IndexError, match="permutation of 5"):
            permutation(np.array([0, place]))


def _bin_sizes(size, bins):
    return np.bincount(np.arange(size) * bins // size, minlength=bins)


def _sigmas(counts, weights=None):
    """Return how far chi-square lies above its mean, in standard deviations."""
    weights = np.ones(len(counts)) if weights is None else weights
    expected = counts.sum() * weights / weights.sum()
    chi_square, freedom = ((counts - expected) ** 2 / expected).sum(), len(counts) - 1
    return (chi_square - freedom) / (2 * freedom) ** 0.5
