"""Choices are counted, and nowhere is not counted."""

import pytest
import torch

from megablocks_core.layers.moe.counting import count_choices


@pytest.mark.parametrize("num_experts", [7, 3000])  # compared, and sorted
def test_counts_are_those_of_bincount(num_experts):
    indices = torch.randint(-1, 5, (30, 3))
    counts = indices[indices >= 0].bincount(minlength=num_experts)
    assert torch.equal(count_choices(indices, num_experts), counts)
    assert not count_choices(indices[:0], num_experts).any()
