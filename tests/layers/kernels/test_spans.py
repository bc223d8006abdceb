"""Tiles cover each span once, from counts that stay on the device."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from megablocks_core.layers.kernels.spans import spans_of, tiles_of

COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=9)


def covered(tiles, size):
    """The expert of each place, from the tiles."""
    places = {}
    for expert, first, end in zip(*(each.tolist() for each in tiles), strict=True):
        if expert >= 0:
            for place in range(first, min(first + size, end)):
                assert place not in places
                places[place] = expert
    return places


@given(COUNTS, st.integers(0, 20), st.sampled_from([1, 4, 16]))
def test_tiles_cover_every_place_of_every_expert_once(counts, empty, size):
    num_places = sum(counts) + empty
    tiles = tiles_of(spans_of(torch.tensor(counts), num_places), num_places, size)
    experts = [expert for expert, count in enumerate(counts) for _ in range(count)]
    assert covered(tiles, size) == dict(enumerate(experts))


@given(COUNTS, st.integers(0, 3))
def test_tiles_cover_places_at_a_capacity(counts, spare):
    capacity = max(counts) + spare
    num_places = capacity * len(counts)
    spans = spans_of(torch.tensor(counts), num_places, capacity=capacity)
    expected = {
        expert * capacity + place: expert
        for expert, count in enumerate(counts)
        for place in range(count)
    }
    assert covered(tiles_of(spans, num_places, 4), 4) == expected


def test_the_number_of_tiles_is_the_least_that_always_suffices():
    spans = spans_of(torch.tensor([1, 1, 6]), 8)
    assert tiles_of(spans, 8, 4).experts.tolist() == [0, 1, 2, 2, -1]
    assert tiles_of(spans_of(torch.tensor([1, 2, 9, 0]), 12), 12, 4).experts.shape == (7,)
    assert tiles_of(spans_of(torch.tensor([0, 0]), 0), 0, 4).experts.shape == (0,)


def test_no_span_goes_beyond_the_places():
    assert spans_of(torch.tensor([3, 9]), 5).ends.tolist() == [3, 5]


def test_nothing_is_read_on_the_host():
    with FakeTensorMode():
        spans = spans_of(torch.zeros(8, dtype=torch.int64), 100)
        assert tiles_of(spans, 100, 16).experts.shape == (14,)
