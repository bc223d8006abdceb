"""Where the places of each expert lie, and the tiles of rows that products are cut into.

Nothing here reads a value on the host.

Dimensions: N places, e experts, t tiles.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Spans(NamedTuple):
    """Expert j has the places from ``starts[j]`` up to ``ends[j]``, without it.

    Attributes:
        starts: First place of each [e], int64.
        ends: Where each ends [e], int64, at most N.
    """

    starts: Tensor
    ends: Tensor


class Tiles(NamedTuple):
    """At most so many consecutive places of one expert each; one product of matrices.

    Attributes:
        experts: Whose places they are [t], int32; -1 where a tile is left over.
        firsts: The first place of each [t], int32.
        ends: Where the places of its expert end [t], int32.
    """

    experts: Tensor
    firsts: Tensor
    ends: Tensor


def spans_of(counts_e: Tensor, num_places: int, *, capacity: int | None = None) -> Spans:
    """Spans one after another, or each from a multiple of the capacity on.

    Args:
        counts_e: Places that each expert fills [e].
        num_places: N; no span goes beyond, whatever the counts are.
        capacity: Places that each expert has.
    """
    counts = counts_e.to(torch.int64)
    if capacity is None:
        starts = counts.cumsum(0) - counts
    else:
        starts = torch.arange(counts.shape[0], device=counts.device) * capacity
    return Spans(starts, (starts + counts).clamp(max=num_places))


def tiles_of(spans: Spans, num_places: int, size: int) -> Tiles:
    """Tiles of ``size`` places that cover every span.

    Their number depends on N and e alone: m spans that are not empty need at most N // size + m.
    """
    starts, ends = spans
    num_experts = starts.shape[0]
    needed = (ends - starts).clamp(min=0).add(size - 1).div(size, rounding_mode="floor")
    last = needed.cumsum(0)
    bound = num_places // size + min(num_experts, num_places)
    tiles = torch.arange(bound, device=starts.device)
    experts = torch.searchsorted(last, tiles, right=True)
    used = experts < num_experts
    at = experts.clamp(max=num_experts - 1)
    firsts = starts[at] + (tiles - (last - needed)[at]) * size
    return Tiles(
        torch.where(used, experts, -1).int(),
        torch.where(used, firsts, 0).int(),
        torch.where(used, ends[at], 0).int(),
    )
