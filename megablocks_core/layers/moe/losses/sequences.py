"""Sums of a routing over each sequence, without a value on the host.

Dimensions: T tokens, E experts, B sequences.
"""

import torch
from torch import Tensor

from megablocks_core.layers.moe.routing import Routing


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
            sequences, or ``cu_seqlens`` is no vector of integers.
    """
    (tokens, experts), chosen = routing.scores.shape, routing.indices
    if (sequence_length is None) == (cu_seqlens is None):
        raise ValueError("one of sequence_length and cu_seqlens must be given, not both")
    if cu_seqlens is None:
        if not sequence_length or sequence_length < 1 or tokens % sequence_length:
            raise ValueError(
                f"sequence_length={sequence_length} must divide the {tokens} tokens of the routing"
            )
        bounds = torch.arange(0, tokens + 1, sequence_length, device=routing.scores.device)
    else:
        if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or len(cu_seqlens) < 1:
            raise ValueError(
                f"cu_seqlens of {cu_seqlens.dtype} and shape {list(cu_seqlens.shape)} must be "
                "integers [B + 1]"
            )
        bounds = cu_seqlens.long()
    every = torch.arange(experts, device=chosen.device)
    choices_TE = (chosen.unsqueeze(-1) == every).sum(1)
    counted_T = torch.ones_like(chosen[:, 0]) if routing.mask is None else routing.mask.long()
    return (
        _sums(routing.scores, bounds),
        _sums(choices_TE, bounds),
        _sums(counted_T.unsqueeze(1), bounds).squeeze(1),
    )


def _sums(x: Tensor, bounds: Tensor) -> Tensor:
    """Sum of the rows between neighbouring bounds."""
    if x.is_floating_point():
        return torch.segment_reduce(x, "sum", offsets=bounds, axis=0, unsafe=True)
    before = torch.cat([x.new_zeros(1, x.shape[1]), x.cumsum(0)])
    return before[bounds[1:]] - before[bounds[:-1]]
