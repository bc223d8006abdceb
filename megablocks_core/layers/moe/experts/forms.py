"""The forms of the experts that are one step of autograd.

Dimensions: N places, H hidden size.
"""

import torch
from torch import Tensor

from megablocks_core.layers.moe.dispatch import Dispatched
from megablocks_core.layers.moe.experts.chunks import Chunks
from megablocks_core.layers.moe.experts.function import run
from megablocks_core.layers.moe.experts.memory import FRESH, Memory
from megablocks_core.layers.moe.experts.places import host_counts
from megablocks_core.layers.moe.experts.projections import Formula, Projections
from megablocks_core.layers.moe.experts.tiles import Tiles, tiles_fit
from megablocks_core.layers.moe.experts.whole import Whole


def capacity(
    dispatched: Dispatched,
    projections: Projections,
    formula: Formula,
    *,
    memory: Memory = FRESH,
) -> Tensor:
    """Weighted results [N H] by batched products over the capacity. Reads nothing on the host.

    Raises:
        ValueError: The tokens were dispatched without a capacity.
    """
    require_capacity(dispatched)
    return run(Whole(), dispatched, projections, formula, persistent=memory.keeps)


def require_capacity(dispatched: Dispatched) -> None:
    """Raise for tokens that were dispatched without a capacity."""
    if dispatched.capacity is None:
        raise ValueError("capacity=None of what is dispatched must be a number: form='capacity'")


def grouped(
    dispatched: Dispatched,
    projections: Projections,
    formula: Formula,
    *,
    memory: Memory = FRESH,
) -> Tensor:
    """Weighted results [N H], by products of as many rows as each expert has.

    With a capacity these are batched. Without, they are grouped ones on a GPU and in compiled
    code, whose counts stay on the device; else one an expert, for which counts are read on the
    host.
    """
    if dispatched.capacity is not None:
        return capacity(dispatched, projections, formula, memory=memory)
    if torch.compiler.is_compiling() or dispatched.x.is_cuda:
        ends = dispatched.tokens_per_expert.cumsum(0).to(torch.int32)
        return run(Whole(), dispatched, projections, formula, bounds=ends, persistent=memory.keeps)
    by_tiles = tiles_fit(dispatched.x, dispatched.weights, projections, formula)
    computation = (Tiles if by_tiles else Chunks)(host_counts(dispatched), memory=memory)
    return run(computation, dispatched, projections, formula, persistent=memory.keeps)
