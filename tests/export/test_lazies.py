"""Lazy tensors read the box that is asked for, with an end at both sides of each dimension."""

import pytest
import torch

from megablocks_core.export.lazies import View, lazy, outline, resized, shape_of, with_ends

WHOLE = torch.arange(24.0).view(2, 3, 4)


@pytest.mark.parametrize(
    "box, ends",
    [
        (..., ((0, 2), (0, 3), (0, 4))),
        (slice(1, 2), ((1, 2), (0, 3), (0, 4))),
        ((slice(None), slice(1, 9)), ((0, 2), (1, 3), (0, 4))),
        ((slice(2, 1), slice(0, 1), slice(-1, None)), ((2, 2), (0, 1), (3, 4))),
    ],
)
def test_boxes_have_both_ends_of_each_dimension(box, ends):
    asked = []

    def read(given):
        asked.append(given)
        return WHOLE[given]

    view = View((2, 3, 4), "F32", read)
    expected = WHOLE[tuple(slice(*pair) for pair in ends)]
    assert torch.equal(view[box], expected)
    assert asked == [tuple(slice(*pair) for pair in ends)]


def test_tensors_in_memory_and_outlines():
    tensor = lazy(WHOLE, "F32")
    assert (shape_of(tensor), tensor.get_dtype()) == ((2, 3, 4), "F32")
    assert torch.equal(tensor[0:1, 2:3], WHOLE[0:1, 2:3])
    assert shape_of(outline((5, 0))) == (5, 0)
    with pytest.raises(AssertionError, match="an outline has no values"):
        outline((5, 0))[...]


def test_one_dimension_is_another():
    assert resized((2, 3, 4), 1, 7) == (2, 7, 4)
    box = (slice(0, 2), slice(0, 3), slice(0, 4))
    assert with_ends(box, 2, 1, 3) == (slice(0, 2), slice(0, 3), slice(1, 3))
