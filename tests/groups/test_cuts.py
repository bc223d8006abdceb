"""Cuts follow torch.chunk, cover every element, and count what is held twice once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.groups import Group, Segment, ShardSpec, chunk_slice, own_slices, split_evenly
from megablocks_core.groups.cuts import held_ranges, whole_shape


def _group(size, rank=0):
    return Group(tuple(range(size)), rank=rank)


@st.composite
def _specs(draw, size):
    """Cuts of a dimension over ``size`` ranks, with packed, uneven and shared segments."""
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    segments = []
    for _ in range(draw(st.integers(1, 3))):
        parts = draw(st.sampled_from([None, *divisors]))
        size_of = draw(st.integers(0, 7)) * (parts or 1) + (0 if parts else draw(st.integers(0, 3)))
        segments.append(Segment(size_of, parts))
    return tuple(segments)


@given(st.integers(0, 40), st.integers(1, 9))
def test_chunk_slices_are_those_of_torch(length, parts):
    chunks = torch.arange(length).chunk(parts) if length else ()
    for index in range(parts):
        ours = list(range(length))[chunk_slice(length, parts, index)]
        assert ours == (chunks[index].tolist() if index < len(chunks) else [])


@given(st.data(), st.sampled_from([1, 2, 4, 6]))
def test_every_element_is_held_and_counted_once(data, size):
    segments = data.draw(_specs(size))
    spec = ShardSpec(0, _group(size), segments)
    length = spec.whole_length(0)
    held, counted = [], []
    for rank in range(size):
        mine = [i for part in spec.ranges(length, rank) for i in range(length)[part]]
        held += mine
        counted += [i for part in spec.counted(length, rank) for i in mine[part]]
    assert set(held) == set(range(length))
    assert sorted(counted) == list(range(length))


@given(st.data(), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]))
def test_boxes_of_nested_cuts_fill_the_local_tensor(data, outer, inner):
    """Two cuts of one dimension and one of another: boxes agree with indexing step by step."""
    outer_rank = data.draw(st.integers(0, outer - 1))
    inner_rank = data.draw(st.integers(0, inner - 1))
    segments = data.draw(_specs(outer))
    first = ShardSpec(1, _group(outer, outer_rank), segments)
    length = first.whole_length(0)
    after_first = sum(r.stop - r.start for r in first.ranges(length))
    second = ShardSpec(1, _group(inner, inner_rank), (Segment(after_first),))
    third = ShardSpec(0, _group(inner, inner_rank))

    whole = torch.arange(3 * inner * length).view(3 * inner, length)
    local = torch.cat([whole[:, part] for part in first.ranges(length)], dim=1)
    local = local[:, second.ranges(after_first)[0]][third.ranges(3 * inner)[0]]

    filled = torch.full_like(local, -1)
    for theirs, ours in own_slices((first, second, third), (3 * inner, length)):
        filled[ours] = whole[theirs]
    assert torch.equal(filled, local)
    assert whole_shape(tuple(local.shape), (first, second, third)) == (3 * inner, length)


def test_ranges_of_another_rank_can_be_asked_for():
    group = _group(4, rank=3)
    spec = ShardSpec(0, group, (Segment(6),))
    assert held_ranges((6,), (spec,)) == [[]]
    assert held_ranges((6,), (spec,), {group: 1}) == [[slice(2, 4)]]


def test_a_cut_that_is_not_named_must_be_even():
    with pytest.raises(ValueError, match="length 6 .* group of 4"):
        ShardSpec(0, _group(4)).ranges(6)
    assert split_evenly(8, group=_group(4, rank=2), name="out_features") == slice(4, 6)
    with pytest.raises(ValueError, match="num_heads=6 must divide evenly over a group of 4 ranks"):
        split_evenly(6, group=_group(4), name="num_heads")


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Segment(-1), "size=-1"),
        (lambda: Segment(6, parts=4), "parts=4"),
        (lambda: Segment(6, parts=0), "parts=0"),
        (lambda: ShardSpec(-1, _group(2)), "dim=-1"),
        (lambda: ShardSpec(0, _group(4), (Segment(6, parts=3),)), "parts=3 must divide"),
        (lambda: ShardSpec(0, _group(2), (Segment(6),)).ranges(8), "add up to the length 8"),
    ],
)
def test_cuts_that_cannot_be_raise(build, words):
    with pytest.raises(ValueError, match=words):
        build()


def test_a_rank_holds_as_much_as_its_ranges():
    spec = ShardSpec(0, Group(), segments=(Segment(4), Segment(3)))
    assert spec.held_length(7) == 7
    assert ShardSpec(0, Group()).held_length(5, rank=0) == 5
