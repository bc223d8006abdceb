"""Box arithmetic agrees with arrays in which every element is painted."""

from itertools import combinations
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.ckpt.plans.boxes import (
    _numbered,
    _tile_by_pairs,
    any_meet,
    as_array,
    as_boxes,
    cells,
    flat_boxes,
    inside,
    intersection,
    lengths,
    moved,
    sizes,
    split,
    strides,
    tile,
    whole_box,
)

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def shapes_and_boxes(draw, max_boxes=6):
    shape = draw(SHAPES)
    boxes = []
    for _ in range(draw(st.integers(1, max_boxes))):
        starts = [draw(st.integers(0, length - 1)) for length in shape]
        stops = [
            draw(st.integers(start + 1, length))
            for start, length in zip(starts, shape, strict=True)
        ]
        boxes.append(tuple(map(slice, starts, stops)))
    return shape, boxes


def _painted(shape, boxes):
    counts = np.zeros(shape, dtype=int)
    for box in boxes:
        counts[box] += 1
    return counts


@given(shapes_and_boxes(max_boxes=2))
def test_intersection_and_moves(case):
    shape, (one, *others) = case
    other = others[0] if others else whole_box(shape)
    both = intersection(one, other)
    expected = _painted(shape, [one, other]) == 2
    assert np.array_equal(_painted(shape, [both] if both is not None else []) == 1, expected)
    if both is not None:
        assert moved(inside(both, one), one) == both
        assert lengths(inside(both, other)) == lengths(both)


@given(SHAPES, st.data())
def test_flat_ranges_are_boxes_in_flat_order(shape, data):
    start = data.draw(st.integers(0, prod(shape)))
    stop = data.draw(st.integers(start, prod(shape)))
    boxes = flat_boxes(start, stop, shape)
    numbers = np.arange(prod(shape)).reshape(shape)
    parts = [numbers[box].reshape(-1) for box in boxes]
    assert np.concatenate([*parts, []]).tolist() == list(range(start, stop))
    assert len(boxes) <= 2 * max(len(shape) - 1, 0) + 1


def test_flat_ranges_of_nothing():
    assert flat_boxes(0, 0, (2, 3)) == flat_boxes(0, 5, (2, 0)) == []
    assert flat_boxes(0, 1, ()) == [()]


@given(shapes_and_boxes())
def test_cells_are_disjoint_and_know_their_holders(case):
    shape, boxes = case
    found = cells(boxes)
    counts = _painted(shape, [cell for cell, _ in found])
    assert np.array_equal(counts, (_painted(shape, boxes) > 0).astype(int))
    for cell, holders in found:
        assert holders == [
            index for index, box in enumerate(boxes) if intersection(cell, box) is not None
        ]
    assert tile(as_array([cell for cell, _ in found], len(shape)), shape) == bool(counts.all())


@given(shapes_and_boxes())
def test_tile_is_every_element_exactly_once(case):
    shape, boxes = case
    array = as_array(boxes, len(shape))
    assert as_boxes(array) == boxes
    assert sizes(array).tolist() == [prod(lengths(box)) for box in boxes]
    assert tile(array, shape) == bool((_painted(shape, boxes) == 1).all())


@pytest.mark.parametrize(
    "boxes",
    [
        [(slice(0, 2),), (slice(2, 3),), (slice(2, 3),), (slice(3, 3),)],  # a gap and an overlap
        [(slice(0, 5),)],
        [],
    ],
)
def test_no_tiling(boxes):
    assert not tile(as_array(boxes, 1), (4,))


@given(shapes_and_boxes())
def test_tile_by_pairs_is_the_same(case):
    shape, boxes = case
    array = as_array(boxes, len(shape))
    assert _tile_by_pairs(array, shape) == tile(array, shape)
    ends = array.reshape(2 * len(boxes), len(shape))
    rows = [tuple(row) for row in ends.tolist()]
    for lengths_ in (shape, (2**40,) * len(shape)):  # with room for a number each, and without
        numbers = _numbered(ends, lengths_).tolist()
        assert len(set(zip(rows, numbers, strict=True))) == len(set(rows)) == len(set(numbers))


@pytest.mark.parametrize("shape", [(1,) * 64, (2,) * 40, (1, 2**61, 1, 3)])
def test_many_and_long_dimensions_take_no_time(shape):
    whole = whole_box(shape)
    dim = shape.index(max(shape))
    middle = shape[dim] // 2
    parts = [
        (*whole[:dim], slice(*ends), *whole[dim + 1 :])
        for ends in ((0, middle), (middle, shape[dim]))
        if ends[0] < ends[1]
    ]
    assert tile(as_array(parts, len(shape)), shape)
    assert not tile(as_array([*parts, parts[0]], len(shape)), shape)


def test_every_dimension_of_one_element_weighs_nothing():
    assert strides((1,) * 64).tolist() == [1] * 64
    assert strides((1, 3, 1, 2)).tolist() == [12, 3, 3, 1]


def test_boxes_cut_in_many_dimensions():
    """A whole of 2**30 elements, less one corner after the other."""
    shape = (2,) * 30
    boxes = [
        ((slice(0, 1),) * dim + (slice(1, 2),) + (slice(0, 2),) * (29 - dim)) for dim in range(30)
    ]
    assert not tile(as_array(boxes, 30), shape)
    assert tile(as_array([*boxes, (slice(0, 1),) * 30], 30), shape)
    with pytest.raises(ValueError, match="1110 boxes .* too many dimensions to be compared"):
        tile(as_array(boxes * 37, 30), shape)


_BOXES = st.tuples(*[st.tuples(st.integers(0, 3), st.integers(1, 3))] * 2)


@given(st.lists(_BOXES, max_size=5))
def test_boxes_that_meet_are_found(ranges):
    boxes = [tuple(slice(start, start + length) for start, length in box) for box in ranges]
    held = [{(i, j) for i in range(*_ends(a)) for j in range(*_ends(b))} for a, b in boxes]
    assert any_meet(boxes) == any(a & b for a, b in combinations(held, 2))


def test_scalars_meet():
    assert any_meet([(), ()]) and not any_meet([()]) and not any_meet([])


def _ends(part):
    return part.start, part.stop


def test_no_boxes():
    assert cells([]) == [] and as_boxes(as_array([], 2)) == []


@given(shapes_and_boxes(max_boxes=1), st.integers(1, 30))
def test_split_boxes_are_bounded_and_in_order(case, most):
    shape, (box,) = case
    parts = split(box, most)
    assert np.array_equal(_painted(shape, parts), _painted(shape, [box]))
    assert all(prod(lengths(part)) <= most for part in parts)
    assert [[p.start for p in part] for part in parts] == sorted(
        [p.start for p in part] for part in parts
    )
    if prod(lengths(box)) <= most:
        assert parts == [box]
