"""Counts of sources follow their weights, and samples of a source follow each other."""

from math import log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.data.mixture import BLOCK, Mixture, Shares

WEIGHTS = st.lists(st.one_of(st.floats(0, 1e3), st.integers(0, 9)), min_size=1, max_size=9).filter(
    lambda weights: sum(weights) > 1e-6
)


@given(weights=WEIGHTS, start=st.integers(0, 10**15))
def test_shares_add_up_never_fall_and_stay_near_the_weights(weights, start):
    shares = Shares(weights)
    bound = (1 + log2(len(weights))) / 2 + 1e-3  # of float arithmetic here
    exact = np.array(weights, np.longdouble) / sum(map(np.longdouble, weights))
    before = shares.counts(start)
    for number in range(start + 1, start + 30):
        counts = shares.counts(number)
        assert counts.sum() == number
        assert ((counts - before == 0) | (counts - before == 1)).all()
        assert (abs(counts - exact * number) <= bound).all()
        assert not counts[np.array(weights) == 0].any()
        before = counts


@given(sizes=st.lists(st.integers(0, 10**12), min_size=1, max_size=9).filter(any))
def test_whole_shares_are_met_exactly(sizes):
    assert Shares(sizes).counts(sum(sizes)).tolist() == sizes


@st.composite
def mixtures(draw):
    num_sources = draw(st.integers(1, 5))
    starts = sorted(draw(st.sets(st.integers(1, 700), max_size=3)))
    weight = st.lists(st.integers(0, 5), min_size=num_sources, max_size=num_sources).filter(any)
    return num_sources, [(start, draw(weight)) for start in [0, *starts]]


@given(mixture=mixtures(), seed=st.integers(0, 2**64 - 1))
def test_no_source_repeats_or_leaves_out_a_sample(mixture, seed):
    num_sources, segments = mixture
    mixed = Mixture(num_sources, segments, seed=seed)
    sources, indices = mixed.find(np.arange(1000))
    given = np.zeros(num_sources, np.int64)
    for sample in range(1000):
        if sample % 97 == 0 or sample in dict(segments):
            assert mixed.counts(sample).tolist() == given.tolist()
        assert indices[sample] == given[sources[sample]]
        given[sources[sample]] += 1
    for (start, weights), after in zip(segments, [*segments[1:], (1000, [])], strict=True):
        of_segment = set(sources[start : after[0]].tolist())
        assert all(weights[source] > 0 for source in of_segment)


@given(mixture=mixtures(), samples=st.lists(st.integers(0, 10**12), min_size=1, max_size=5))
def test_any_sample_is_found_by_itself(mixture, samples):
    num_sources, segments = mixture
    together = Mixture(num_sources, segments, seed=1).find(np.array(samples))
    alone = [Mixture(num_sources, segments, seed=1).find(np.array([k])) for k in samples]
    assert [part.tolist() for part in together] == np.concatenate(alone, 1).tolist()


@given(border=st.integers(1, 999))
def test_a_border_added_later_leaves_what_lies_before(border):
    before = Mixture(3, [(0, [5, 2, 1])], seed=4).find(np.arange(border))
    edited = Mixture(3, [(0, [5, 2, 1]), (border, [0, 1, 1])], seed=4).find(np.arange(border))
    assert all(map(np.array_equal, before, edited))


def test_the_mix_of_every_window_is_within_four_sigma():
    """Chi-square of every window of a batch, at its start anywhere; and never a drift."""
    weights = np.array([0.4, 0.3, 0.2, 0.06, 0.04])
    sources, _ = Mixture(5, [(0, weights.tolist())], seed=9).find(np.arange(40_000))
    ones = np.zeros((40_001, 5))
    ones[1:] = np.eye(5)[sources].cumsum(0)
    for batch in (128, 256, 512, 1000):
        seen = ones[batch::batch] - ones[:-batch:batch][: len(ones[batch::batch])]
        chi_square = ((seen - batch * weights) ** 2 / (batch * weights)).sum(1)
        assert chi_square.max() <= 4 + 4 * np.sqrt(2 * 4)
        assert chi_square.sum() <= 4 * len(seen) + 4 * np.sqrt(2 * 4 * len(seen))
    starts = np.arange(0, 39_000, 7)  # windows anywhere, up to the sources of two cut blocks
    for batch in (32, 300, 1000):
        seen = ones[starts + batch] - ones[starts]
        sigma = np.sqrt(batch * weights * (1 - weights))
        assert (abs(seen - batch * weights) <= 4 * sigma + 2).all()
    assert (abs(ones - np.arange(40_001)[:, None] * weights) <= 4 * np.sqrt(BLOCK) / 2).all()


def test_sources_inside_a_block_are_shuffled():
    """Neighbours, and the sources seen at one place of many blocks, are independent."""
    sources, _ = Mixture(2, [(0, [1, 1])], seed=2).find(np.arange(BLOCK * 2000))
    blocks = sources.reshape(2000, BLOCK)
    assert (blocks.sum(1) == BLOCK / 2).all()
    equal = (blocks[:, 1:] == blocks[:, :-1]).sum()
    expected = 2000 * (BLOCK - 1) * (BLOCK / 2 - 1) / (BLOCK - 1)
    assert abs(equal - expected) <= 4 * np.sqrt(2000 * BLOCK) / 2
    at_place = blocks.sum(0)
    chi_square = ((at_place - 1000) ** 2 / 500).sum()
    assert abs(chi_square - BLOCK) <= 4 * np.sqrt(2 * BLOCK)
    other, _ = Mixture(2, [(0, [1, 1])], seed=3).find(np.arange(BLOCK * 2000))
    assert abs((sources == other).mean() - 0.5) <= 4 * 0.5 / np.sqrt(BLOCK * 2000)


@pytest.mark.parametrize("stop", [1, 50, 64, 300])
def test_a_last_block_ends_at_the_stop(stop):
    sizes = [stop - stop // 3, stop // 3]
    sources, indices = Mixture(2, [(0, sizes)], seed=1, stop=stop).find(np.arange(stop))
    for source, size in enumerate(sizes):
        assert indices[sources == source].tolist() == list(range(size))
