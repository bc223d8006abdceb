"""Choices are counted, and nowhere is not counted."""

import torch

from megablocks_core.layers.moe.routers.counting import count_choices


def test_counts_are_those_of_bincount():
    indices = torch.randint(-1, 5, (30, 3))
    counts = indices[indices >= 0].bincount(minlength=7)
    assert torch.equal(count_choices(indices, 7), counts)
    assert count_choices(indices[:0], 3).tolist() == [0, 0, 0]
