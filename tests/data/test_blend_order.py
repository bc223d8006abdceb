"""The native blend order equals its NumPy twin, a plain loop, and Megatron-LM's own."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.data import blend_order
from megablocks_core.data.blend_order import exhaustive, greedy

BOTH = pytest.mark.parametrize("native", [True, False], ids=["native", "numpy"])


@pytest.fixture
def ways(monkeypatch):
    """Return a function that draws natively and in NumPy; the two must agree."""

    def draw(function, *arguments):
        native = function(*arguments)
        with monkeypatch.context() as patch:
            patch.setattr(blend_order, "_native", None)
            twin = function(*arguments)
        for ours, other in zip(native, twin, strict=True):
            assert ours.dtype == other.dtype
            assert np.array_equal(ours, other)
        return native

    return draw


def plain_greedy(weights, size):
    drawn, order = [0] * len(weights), []
    for sample in range(size):
        behind = [w * max(sample, 1) - d for w, d in zip(weights, drawn, strict=True)]
        behind = [b if w else -float("inf") for b, w in zip(behind, weights, strict=True)]
        source = behind.index(max(behind))
        order.append((source, drawn[source]))
        drawn[source] += 1
    return order


@given(
    weights=st.lists(st.one_of(st.just(0.0), st.floats(1e-9, 1)), min_size=1, max_size=9).filter(
        any
    ),
    size=st.integers(0, 60),
)
def test_greedy_equals_a_plain_loop(weights, size):
    source, index = greedy(weights, size)
    assert list(zip(source.tolist(), index.tolist(), strict=True)) == plain_greedy(weights, size)


@pytest.mark.parametrize("count", [1, 2, 3, 8, 17, 100])
def test_both_ways_draw_the_same(ways, count):
    rng = np.random.default_rng(count)
    weights = rng.dirichlet(np.full(count, 0.5))
    source, index = ways(greedy, weights, 5000)
    assert source.dtype == np.int16
    assert index.dtype == np.int64
    counts = np.bincount(source, minlength=count)
    assert np.abs(counts - 5000 * weights).max() < count
    for each in range(count):  # in the source's own order
        assert np.array_equal(index[source == each], np.arange(counts[each]))
    ways(exhaustive, counts)


@given(sizes=st.lists(st.integers(0, 12), max_size=9))
def test_exhaustive_draws_every_sample_once(sizes):
    source, index = exhaustive(sizes)
    drawn = sorted(zip(source.tolist(), index.tolist(), strict=True))
    assert drawn == [(s, i) for s, size in enumerate(sizes) for i in range(size)]


def test_exhaustive_goes_in_proportion_until_a_source_is_spent(ways):
    """In floats 0.6 * 2 - 1 is less than 0.1 * 2, so the last source comes third."""
    source, _ = ways(exhaustive, [6, 3, 0, 1])
    assert source.tolist() == [0, 1, 3, 0, 0, 1, 0, 0, 1, 0]


def test_every_source_with_a_weight_is_drawn_and_no_other(ways):
    source, _ = ways(greedy, [1 - 1e-9, 1e-9, 0.0], 1000)
    assert np.bincount(source, minlength=3).tolist() == [999, 1, 0]
    source, _ = ways(greedy, [0.0, 0.5, 0.5], 50)  # at a tie of all, the first would be drawn
    assert np.bincount(source).tolist() == [0, 25, 25]


def test_more_sources_than_int16_numbers_are_numbered_by_int32(ways):
    count = 2**15 + 1
    source, index = ways(exhaustive, np.ones(count, np.int64)[:40])
    assert source.dtype == np.int16
    source, index = exhaustive(np.ones(count, np.int64))
    assert source.dtype == np.int32
    assert np.array_equal(source, np.arange(count))
    assert not index.any()


def test_no_window_of_a_batch_is_far_from_the_weights():
    """The mix of sources in every window of 64 samples is even: never 4 sigma of chance away."""
    weights = np.array([0.5, 0.3, 0.15, 0.05])
    source, _ = greedy(weights, 10_000)
    for each, weight in enumerate(weights):
        before = np.concatenate([[0], (source == each).cumsum()])
        mix = before[64:] - before[:-64]
        assert np.abs(mix - 64 * weight).max() < 4 * (64 * weight * (1 - weight)) ** 0.5


@BOTH
@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (greedy, ([0.5, -0.5], 3), "weights=.* must be a row of numbers, finite and 0 or more"),
        (greedy, ([0.5, float("nan")], 3), "weights=.* must be a row of numbers"),
        (greedy, ([0.5, float("inf")], 3), "weights=.* must be a row of numbers"),
        (greedy, ([[0.5, 0.5]], 3), "weights=.* must be a row of numbers"),
        (greedy, ([0.0, 0.0], 3), "weights=.* must have one above 0"),
        (greedy, ([], 3), "weights=.* must have one above 0"),
        (greedy, ([1.0], -1), "size=-1 must be at least 0"),
        (exhaustive, ([3, -1],), "sizes=.* must be 0 or more"),
        (greedy, (["x"], 3), "weights=.* must be a row of numbers"),
        (exhaustive, ([2**62, 2**62],), "sizes=.* sum to at most"),
        (exhaustive, ([3.0],), "sizes=.* must be one row of whole numbers"),
        (exhaustive, ([[3]],), "sizes=.* must be one row of whole numbers"),
    ],
)
def test_bad_input_is_named(monkeypatch, native, function, arguments, message):
    if not native:
        monkeypatch.setattr(blend_order, "_native", None)
    with pytest.raises(ValueError, match=message):
        function(*arguments)


def test_a_thousand_random_blends_have_megatrons_order():
    helpers = pytest.importorskip("megatron.core.datasets.helpers", reason="oracle megatron")
    for case in range(1000):
        rng = np.random.default_rng(case)
        count, size = int(rng.integers(1, 30)), int(rng.integers(1, 400))
        weights = rng.dirichlet(np.full(count, rng.choice([0.1, 1.0, 10.0])))
        if case % 3 == 0:  # many ties
            weights = np.full(count, 1 / count)
        weights = weights[weights > 0]
        source, index = np.zeros(size, np.int16), np.zeros(size, np.int64)
        helpers.build_blending_indices(source, index, weights, len(weights), size, False)
        ours = greedy(weights, size)
        assert np.array_equal(ours.source, source)
        assert np.array_equal(ours.index, index)

        sizes = rng.integers(1, 40, count)
        source, index = np.zeros(sizes.sum(), np.int16), np.zeros(sizes.sum(), np.int64)
        helpers.build_exhaustive_blending_indices(source, index, sizes, count)
        ours = exhaustive(sizes)
        assert np.array_equal(ours.source, source)
        assert np.array_equal(ours.index, index)
