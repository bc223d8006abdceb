"""Kernels are started with contiguous arrays, on grids that are not empty."""

import torch

from megablocks_core.layers.kernels.launching import arrays, launch, parts


def test_an_empty_grid_launches_nothing():
    launch(None, (0, 3), torch.zeros(0))


def test_arrays_are_contiguous_and_the_first_stands_for_what_is_missing():
    first, strided = torch.zeros(3), torch.zeros(2, 3).T
    one, none, other = arrays(first, None, strided)
    assert one is first and none is first
    assert other.is_contiguous() and other.shape == strided.shape


def test_parts_cover():
    assert [parts(size, 4) for size in (0, 1, 4, 5)] == [0, 1, 1, 2]
