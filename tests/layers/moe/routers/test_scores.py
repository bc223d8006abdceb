"""The highest values, ties and odd numbers included."""

import pytest
import torch

from megablocks_core.layers.moe.routers.scores import highest


@pytest.mark.parametrize("k", [1, 2, 8, 9, 12])
def test_the_highest_are_those_of_a_stable_sort(k):
    values = torch.randint(0, 4, (50, 12)).float()
    assert torch.equal(
        highest(values, k), values.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    )


@pytest.mark.parametrize("k", [2, 10])
def test_no_place_comes_twice_whatever_the_values(k):
    for odd in (float("-inf"), float("inf"), float("nan")):
        found = highest(torch.full((3, 12), odd), k)
        assert all(len(set(row)) == k for row in found.tolist())
