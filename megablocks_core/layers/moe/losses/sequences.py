"""Sums of a routing over each sequence, without a value on the host.

Dimensions: T tokens, E experts, B sequences.
"""

import torch
from torch import Tensor

from megablocks_core.layers.moe.routing import Routing
from megablocks_core.parallel.checks import check_tensors, is_whole, require


def per_sequence(
    routing: Routing, *, sequence_length: int | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of scores [B E], choices of each expert [B E] and counted tokens [B].

    Args:
        routing: Of sequences that lie one after another.
        sequence_length: Tokens of each.
        cu_seqlens: Or where they begin and end [B + 1].

    Raises:
        ValueError: Not exactly one of the two is given, the tokens are no whole number of
            sequences, or ``cu_seqlens`` is no vector of integers that rises over all tokens that
            count.
    """
    (tokens, experts), chosen = routing.scores.shape, routing.indices
    if (sequence_length is None) == (cu_seqlens is None):
        raise ValueError("one of sequence_length and cu_seqlens must be given, not both")
    if cu_seqlens is None:
        if not is_whole(sequence_length) or sequence_length < 1 or tokens % sequence_length:
            raise ValueError(
                f"sequence_length={sequence_length} must divide the {tokens} tokens of the routing"
            )
        bounds = torch.arange(0, tokens + 1, sequence_length, device=routing.scores.device)
    else:
        check_tensors(cu_seqlens=cu_seqlens)
        if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or len(cu_seqlens) < 1:
            raise ValueError(
                f"cu_seqlens of {cu_seqlens.dtype} and shape {list(cu_seqlens.shape)} must be "
                "integers [B + 1]"
            )
        bounds = cu_seqlens.long()
        _check_bounds(bounds, routing)
    every = torch.arange(experts, device=chosen.device)
    choices_TE = (chosen.unsqueeze(-1) == every).sum(1)
    counted_T = _counted(routing).long()
    return (
        _sums(routing.scores, bounds),
        _sums(choices_TE, bounds),
        _sums(counted_T.unsqueeze(1), bounds).squeeze(1),
    )


def _counted(routing: Routing) -> Tensor:
    if routing.mask is not None:
        return routing.mask
    return torch.ones_like(routing.scores[:, 0], dtype=torch.bool)


def _check_bounds(bounds: Tensor, routing: Routing) -> None:
    """Raise unless they rise, and no token that counts lies in no sequence."""
    index = torch.arange(len(routing.scores), device=bounds.device)
    outside = (index < bounds[0]) | (index >= bounds[-1])
    inside = (bounds[0] >= 0) & (bounds[-1] <= len(index)) & (bounds.diff() >= 0).all()
    require(
        inside & ~(outside & _counted(routing)).any(),
        f"cu_seqlens must rise from 0 to the {len(index)} tokens of the routing",
        lambda: (
            f"cu_seqlens={bounds.tolist()} must rise from 0 to the {len(index)} tokens of the "
            "routing, but for tokens at the ends that the mask leaves out"
        ),
    )


def _sums(x: Tensor, bounds: Tensor) -> Tensor:
    """Sum of the rows between neighbouring bounds."""
    if x.is_floating_point():
        return torch.segment_reduce(x, "sum", offsets=bounds, axis=0, unsafe=True)
    before = torch.cat([x.new_zeros(1, x.shape[1]), x.cumsum(0)])
    return before[bounds[1:]] - before[bounds[:-1]]
