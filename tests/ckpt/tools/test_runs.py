"""Runs of a box are its elements, in order, and as few as there can be."""

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.ckpt.tools.runs import runs


@st.composite
def boxes(draw):
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=4)))
    starts = [draw(st.integers(0, length - 1)) for length in shape]
    stops = [
        draw(st.integers(start + 1, length)) for start, length in zip(starts, shape, strict=True)
    ]
    return shape, tuple(map(slice, starts, stops))


@given(boxes())
def test_the_runs_of_a_box_are_its_elements_in_order(case):
    shape, box = case
    whole = torch.arange(prod(shape)).reshape(shape)
    found = list(runs(box, shape))
    elements = [at for run in found for at in range(run.start, run.start + run.length)]
    assert elements == whole[box].flatten().tolist()
    assert [run.place for run in found] == [
        sum(run.length for run in found[:number]) for number in range(len(found))
    ]


def test_whole_rows_are_one_run():
    box = (slice(1, 3), slice(0, 5), slice(0, 6))
    assert list(runs(box, (4, 5, 6))) == [(30, 60, 0)]
    assert list(runs((slice(0, 2), slice(1, 3)), (2, 4))) == [(1, 2, 0), (5, 2, 2)]
