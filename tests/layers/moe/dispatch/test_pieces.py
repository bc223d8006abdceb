"""Pieces hold the slots that one order holds, each once."""

import pytest
import torch

from megablocks_core.layers.moe.dispatch.assignment import by_expert
from megablocks_core.layers.moe.dispatch.pieces import by_piece, count_pieces, widths
from tests.layers.moe.dispatch.reference import choices


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("chunks", [1, 2, 3, 9])
@pytest.mark.parametrize("capacity", [None, 1, 4, 9])
def test_pieces_are_consecutive_parts_of_one_order(tokens, chunks, capacity):
    indices = choices("masked", tokens, 4, 2)
    counts = count_pieces(indices, 4, chunks=chunks, capacity=capacity)
    order = by_piece(indices, 4, chunks=chunks, capacity=capacity)
    whole = by_expert(indices, 4, capacity=capacity)
    assert order.counts.tolist() == counts.sum(0).tolist() == whole.counts.tolist()
    start = 0
    sizes = counts.sum(1).tolist()
    if capacity is not None:
        sizes = [4 * width for width in widths(capacity, chunks)]
        assert sum(sizes) == 4 * capacity and len(sizes) <= chunks and min(sizes) > 0
    for number, size in enumerate(sizes):
        slots = order.slots[start : start + size]
        experts = torch.where(
            slots < 0, -1, indices.reshape(-1)[slots.clamp(min=0)] if tokens else -1
        )
        filled = [(experts == expert).sum().item() for expert in range(4)]
        assert filled == counts[number].tolist()
        kept = experts[experts >= 0]
        assert torch.equal(kept, kept.sort().values)
        start += size
    both = sorted(order.slots.tolist()), sorted(whole.slots.tolist())
    assert both[0] == both[1]
    filled = order.places[order.places >= 0]
    assert torch.equal(order.slots[filled], whole.slots[whole.places[whole.places >= 0]])
