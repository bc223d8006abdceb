"""The highest values, ties and odd numbers included."""

import pytest
import torch
from torch.testing import assert_close

from megablocks_core.layers.moe.routers.scores import highest, take_scores


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


def test_taken_scores_have_the_gradient_of_a_product_with_their_places():
    choices = torch.tensor([[0, -1], [-1, 0], [2, 1], [-1, -1]])
    scores = torch.randn(4, 3, requires_grad=True)
    slope = torch.randn(4, 2)
    taken = take_scores(scores, choices)
    places = (choices[:, :, None] == torch.arange(3)).float()
    expected = (places * scores[:, None]).sum(-1)
    assert_close(taken, expected)
    ours, theirs = (
        torch.autograd.grad((each * slope).sum(), scores)[0] for each in (taken, expected)
    )
    assert_close(ours, theirs)
