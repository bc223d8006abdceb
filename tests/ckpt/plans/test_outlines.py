"""What the ranks hold together, from their messages."""

from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.ckpt.plans.boxes import as_boxes
from megablocks_core.ckpt.plans.outlines import Outline, holdings, pack


@st.composite
def worlds(draw, max_ranks=5, max_tensors=4):
    """Random layouts, most of them with overlaps, gaps and replicas."""
    shapes = draw(
        st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=max_tensors)
    )
    outlines = []
    for _ in range(draw(st.integers(1, max_ranks))):
        held = []
        for index, shape in enumerate(shapes):
            if not draw(st.booleans()):
                continue
            boxes = []
            if prod(shape) and draw(st.booleans()):
                box = []
                for length in shape:
                    start = draw(st.integers(0, length - 1))
                    box.append(slice(start, draw(st.integers(start + 1, length))))
                boxes.append(tuple(box))
            held.append(Outline(f"e/{index}", torch.float16, shape, boxes, index % 2 == 0))
        outlines.append(held)
    return outlines


@given(worlds())
def test_holdings_know_every_element_and_all_its_holders(outlines):
    found = {tensor.name: tensor for tensor in holdings([pack(held) for held in outlines])}
    assert set(found) == {one.name for held in outlines for one in held}
    for name, tensor in found.items():
        painted = np.zeros((len(outlines), *tensor.shape), dtype=bool)
        for rank, held in enumerate(outlines):
            for one in held:
                for box in one.boxes if one.name == name else []:
                    painted[(rank, *box)] = True
        layout = tensor.layout
        assert layout.covered == bool(painted.any(axis=0).all())
        counts = np.zeros(tensor.shape, dtype=int)
        for cell, box in enumerate(as_boxes(layout.cells)):
            counts[box] += 1
            holders = layout.holders_of(cell).tolist()
            if prod(tensor.shape):
                for rank in range(len(outlines)):
                    assert (painted[(rank, *box)] == (rank in holders)).all()
                    assert layout.held_by(rank)[cell] == (rank in holders)
            assert set(layout.choices[cell]) == set(holders)
        assert np.array_equal(counts > 0, painted.any(axis=0)) and counts.max(initial=0) <= 1
        assert layout.sizes.sum() == counts.sum()


def test_equal_layouts_are_worked_out_once():
    boxes = [[(slice(0, 2),)], [(slice(2, 4),)]]
    packed = [
        pack([Outline(f"e/{i}", torch.float32, (4,), boxes[rank]) for i in range(3)])
        for rank in range(2)
    ]
    assert len({id(tensor.layout) for tensor in holdings(packed)}) == 1


def test_names_that_only_some_ranks_hold_keep_the_order_of_the_first():
    names = [["a", "b"], ["b", "c"], ["a", "c"]]
    packed = [pack([Outline(name, torch.int8, (), [()]) for name in held]) for held in names]
    tensors = holdings(packed)
    assert [tensor.name for tensor in tensors] == ["a", "b", "c"]
    assert [tensor.layout.holders.tolist() for tensor in tensors] == [[0, 2], [0, 1], [1, 2]]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Outline("a", torch.int8, (3,), [(slice(0, 3),)]), "ranks disagree on a: shape"),
        (Outline("a", torch.int16, (4,), [(slice(0, 4),)]), "ranks disagree on a: shape"),
        (Outline("a", torch.int8, (4,), [(slice(2, 5),)]), "a: a box must lie in the shape"),
        (Outline("a", torch.int8, (4,), [(slice(-1, 3),)]), "a: a box must lie in the shape"),
    ],
)
def test_disagreement_is_refused(other, message):
    one = Outline("a", torch.int8, (4,), [(slice(0, 4),)])
    with pytest.raises(ValueError, match=message):
        holdings([pack([one]), pack([other])])


def test_a_tensor_of_many_dimensions_takes_no_time():
    (one,) = holdings([pack([Outline("a", torch.int8, (1,) * 64, [(slice(0, 1),) * 64])])])
    assert one.layout.covered
