"""Runs of rows in the order of experts, against a stable sort of their experts."""

import hypothesis.strategies as st
import torch
from hypothesis import given

from megablocks_core.layers.moe.dispatch.regroup import regroup


@st.composite
def _counts(draw):
    """Rows of each run [q p e]."""
    shape = draw(st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3)))
    length = shape[0] * shape[1] * shape[2]
    counts = draw(st.lists(st.integers(0, 3), min_size=length, max_size=length))
    return torch.tensor(counts).view(shape)


@given(_counts(), st.sampled_from([None, 3, 5]))
def test_rows_stand_by_expert_then_source(counts, capacity):
    """Sources in the order of ranks of experts, then of features; tokens as they came."""
    came, position = [], 0
    for q in range(counts.shape[0]):
        for p in range(counts.shape[1]):
            for e in range(counts.shape[2]):
                here = int(counts[q, p, e])
                came += [(e, p, q, position + i) for i in range(here)]
                position += here if capacity is None else capacity
    order = regroup(counts, position, capacity=capacity)
    places = (counts.shape[0] * counts.shape[1] * capacity) if capacity else None
    right = []
    for e in range(counts.shape[2]):
        rows = [row for *_, row in sorted(each for each in came if each[0] == e)]
        right += rows if places is None else rows + [-1] * (places - len(rows))
    assert order.rows.tolist() == right
    back = {row: place for place, row in enumerate(right) if row >= 0}
    assert order.places[:, 0].tolist() == [back.get(row, -1) for row in range(position)]
    assert order.counts.tolist() == counts.sum((0, 1)).tolist()
