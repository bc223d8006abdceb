"""The shuffled order is a bijection, the same everywhere, and looks like chance."""

from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from time import perf_counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.data import Permutation, permutation

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


@given(
    size=st.one_of(st.integers(1, 3000), st.integers(1, 2**63)),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 3),
    threads=st.integers(1, 4),
    data=st.data(),
)
def test_native_equals_its_twin(size, seed, epoch, threads, data):
    places = np.array(data.draw(st.lists(st.integers(0, size - 1), max_size=600)), np.int64)
    order = Permutation(size, seed=seed, epoch=epoch)
    native = order(places, threads=threads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(permutation, "_native", None)
        twin = order(places)
    assert native.dtype == twin.dtype
    assert native.tolist() == twin.tolist()


@pytest.mark.parametrize("size", [1000, 10**5 + 3])
def test_every_thread_writes_its_whole_share(size):
    order, places = Permutation(size, seed=3), np.arange(10**5 + 3) % size
    whole = order(places)
    for threads in (2, 3, 6):
        assert np.array_equal(order(places, threads=threads), whole)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64, np.uint64, ">i8"])
@pytest.mark.parametrize("native", [True, False], ids=["native", "numpy"])
def test_places_of_any_type_and_layout(monkeypatch, dtype, native):
    if not native:
        monkeypatch.setattr(permutation, "_native", None)
    order = Permutation(100, seed=0)
    places = np.arange(99, -1, -1).astype(dtype).reshape(10, 10)[::2].T
    expected = [[order(int(place)) for place in row] for row in places]
    assert order(places).tolist() == expected
    assert order(places[:0]).shape == (0, 5)


def test_other_python_threads_run_meanwhile():
    order, places = Permutation(2**40 + 1, seed=0), np.arange(1_000_000)

    def longest_pause_of_its_time():
        with ThreadPoolExecutor(1) as pool:
            work = pool.submit(_seconds, order, places)
            longest, last = 0.0, perf_counter()
            while not work.done():
                now = perf_counter()
                longest, last = max(longest, now - last), now
            return longest / work.result()

    # A busy machine may stop this thread for as long; the interpreter lock always would.
    assert any(longest_pause_of_its_time() < 0.5 for _ in range(50))


def _seconds(order, places):
    start = perf_counter()
    order(places)
    return perf_counter() - start


def test_the_order_never_changes():
    """Stored data orders depend on these values, on every machine and in every version."""
    assert Permutation(10, seed=0)(np.arange(10)).tolist() == [4, 8, 6, 1, 3, 2, 7, 0, 5, 9]
    assert Permutation(2**63, seed=2**64 - 1, epoch=7)(2**63 - 1) == 8580548222989379266
    assert Permutation(1024, seed=1, epoch=2)(np.arange(6).reshape(2, 3)).tolist() == [
        [803, 990, 184],
        [364, 345, 872],
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


@pytest.mark.parametrize("size", SIZES[:4])
@pytest.mark.parametrize("seeds", [1000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_every_element_stands_at_every_place_equally_often(size, seeds):
    counts = np.zeros((size, size))
    for seed in range(seeds):
        counts[np.arange(size), Permutation(size, seed=seed)(np.arange(size))] += 1
    chi_square, freedom = ((counts - seeds / size) ** 2 / (seeds / size)).sum(), (size - 1) ** 2
    assert abs(chi_square - freedom) < 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seeds", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_windows_of_a_batch_mix_sources_as_chance_does(size, seeds):
    """Three sources lie one after the other; a batch is as many samples as chance would deal.

    How far a window's counts are from the sources' shares has, without replacement, the mean
    and nearly the spread of chi-square with 2 degrees of freedom times (n - b) / (n - 1).
    """
    seeds = range(min(seeds, max(1, 10**7 // size)))
    batch = min(64, size // 2)
    source = np.repeat([0, 1, 2], [size // 2, size * 3 // 10, size - size // 2 - size * 3 // 10])
    shares = np.bincount(source) / size
    total, windows = 0.0, 0
    for seed in seeds:
        drawn = source[Permutation(size, seed=seed)(np.arange(size // batch * batch))]
        for each, share in enumerate(shares):
            counts = (drawn.reshape(-1, batch) == each).sum(1)
            total += ((counts - batch * share) ** 2 / (batch * share)).sum()
        windows += size // batch
    mean = 2 * (size - batch) / (size - 1)
    # Windows of one order are not independent where they are few: their seeds are.
    independent = windows if size > 1000 else len(seeds)
    assert abs(total / windows - mean) < 4 * mean / independent**0.5


@pytest.mark.parametrize("size", SIZES)
def test_orders_of_neighbouring_epochs_are_unrelated(size):
    """Places at which two epochs agree: 1 on average, with a variance of 1."""
    places = np.arange(size)
    orders = [Permutation(size, seed=5, epoch=epoch)(places) for epoch in range(60)]
    agree = [np.count_nonzero(a == b) for a, b in zip(orders[:-1], orders[1:], strict=True)]
    assert abs(np.sum(agree) - 59) < 4 * 59**0.5
    related = [np.corrcoef(a, b)[0, 1] for a, b in zip(orders[:-1], orders[1:], strict=True)]
    assert abs(np.sum(related)) < 4 * (59 / (size - 1)) ** 0.5


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


def test_threads_must_be_positive():
    with pytest.raises(ValueError, match="threads=0 must be at least 1"):
        Permutation(5, seed=0)(np.arange(5), threads=0)


def _bin_sizes(size, bins):
    return np.bincount(np.arange(size) * bins // size, minlength=bins)


def _sigmas(counts, weights=None):
    """Return how far chi-square lies above its mean, in standard deviations."""
    weights = np.ones(len(counts)) if weights is None else weights
    expected = counts.sum() * weights / weights.sum()
    chi_square, freedom = ((counts - expected) ** 2 / expected).sum(), len(counts) - 1
    return (chi_square - freedom) / (2 * freedom) ** 0.5
