"""Groups limit where a token's experts lie."""

import pytest
import torch

from megablocks_core.layers.moe.routers import GroupLimit


def test_experts_outside_of_the_best_groups_are_out():
    scores = torch.tensor([[0.9, 0.0, 0.5, 0.5, 0.1, 0.2]])
    by_best = GroupLimit(3, 1).limit(scores)
    by_two = GroupLimit(3, 1, best=2).limit(scores)
    assert by_best.isfinite().tolist() == [[True, True, False, False, False, False]]
    assert by_two.isfinite().tolist() == [[False, False, True, True, False, False]]


@pytest.mark.parametrize("sizes, words", [((0, 1), "num_groups=0"), ((2, 3), "top_k_groups=3")])
def test_limits_that_cannot_be_are_refused(sizes, words):
    with pytest.raises(ValueError, match=words):
        GroupLimit(*sizes)
