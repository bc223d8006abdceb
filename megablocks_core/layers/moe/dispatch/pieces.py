"""The slots of this rank's tokens, cut into pieces that travel one after another.

Without a capacity a piece is a range of tokens; with one it is a range of each expert's places, so
that no places are added. All pieces lie in one order: places of the first, then of the next.

Dimensions: t tokens, k slots a token, c pieces, E experts, C places an expert, N places.
"""

import torch
from torch import Tensor

from megablocks_core.groups import chunk_slice
from megablocks_core.layers.moe.counting import count_choices
from megablocks_core.layers.moe.dispatch.assignment import Order, by_expert


def widths(capacity: int, chunks: int) -> list[int]:
    """Places of an expert in each piece: at most ``chunks`` pieces, and none is empty."""
    parts = [chunk_slice(capacity, chunks, index) for index in range(chunks)]
    return [part.stop - part.start for part in parts if part.stop > part.start] or [0]


def count_pieces(
    indices_tk: Tensor, num_experts: int, *, chunks: int, capacity: int | None
) -> Tensor:
    """Slots of each expert in each piece [c E], int64."""
    if capacity is None:
        parts = [chunk_slice(len(indices_tk), chunks, index) for index in range(chunks)]
        return torch.stack([count_choices(indices_tk[part], num_experts) for part in parts])
    left = count_choices(indices_tk, num_experts)
    counts = []
    for width in widths(capacity, chunks):
        counts.append(left.clamp(max=width))
        left = left - counts[-1]
    return torch.stack(counts)


def by_piece(indices_tk: Tensor, num_experts: int, *, chunks: int, capacity: int | None) -> Order:
    """The slots sorted by piece, expert, token and slot; ``counts`` are of whole experts."""
    if capacity is not None:
        order = by_expert(indices_tk, num_experts, capacity=capacity)
        return order if chunks == 1 else _cut(order, num_experts, capacity, chunks)
    if chunks == 1:
        return by_expert(indices_tk, num_experts)
    tokens = torch.arange(len(indices_tk), device=indices_tk.device)
    piece = tokens // max(-(-len(indices_tk) // chunks), 1)
    keys = torch.where(indices_tk < 0, -1, indices_tk + num_experts * piece.unsqueeze(1))
    order = by_expert(keys, chunks * num_experts)
    return order._replace(counts=order.counts.view(chunks, num_experts).sum(0))


def _cut(order: Order, num_experts: int, capacity: int, chunks: int) -> Order:
    """Places, which lay expert after expert, cut into pieces."""
    device = order.rows.device
    step = -(-capacity // chunks)
    experts, inside = order.places // capacity, order.places % capacity
    start = inside // step * step
    width = (capacity - start).clamp(max=step)
    places = num_experts * start + experts * width + inside - start
    grid = torch.arange(num_experts * capacity, device=device).view(num_experts, capacity)
    moved = torch.cat([part.reshape(-1) for part in grid.split(step, dim=1)])
    return Order(
        order.slots[moved],
        order.rows[moved],
        torch.where(order.places < 0, -1, places),
        order.counts,
    )
