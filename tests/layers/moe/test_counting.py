"""Choices are counted and stand in queues, and nowhere is not counted."""

import pytest
import torch

from megablocks_core.layers.moe.counting import count_choices, queue_places


@pytest.mark.parametrize("num_experts", [7, 3000])  # compared, and sorted
def test_counts_are_those_of_bincount(num_experts):
    indices = torch.randint(-1, 5, (30, 3))
    counts = indices[indices >= 0].bincount(minlength=num_experts)
    assert torch.equal(count_choices(indices, num_experts), counts)
    assert not count_choices(indices[:0], num_experts).any()


def test_places_in_the_queues_follow_slots_or_values():
    indices = torch.tensor([[2, 0], [2, 2], [-1, 0]])
    assert queue_places(indices, 3).tolist() == [[0, 0], [1, 2], [0, 1]]
    values = torch.tensor([[0.1, 0.5], [0.3, 0.3], [9.0, 0.7]])  # of equal ones the earlier slot
    assert queue_places(indices, 3, by=values).tolist() == [[2, 1], [0, 1], [0, 0]]
    assert queue_places(indices[:0], 3).shape == (0, 2)
