"""Decays within chunks, and the gradients of their logarithms.

Dimensions: Q tokens of a chunk.
"""

import torch
from torch import Tensor


def decays_of(g: Tensor) -> tuple[Tensor, Tensor]:
    """Decays from before a chunk to each token [... Q], and between tokens [... Q Q].

    Logarithms between two tokens are summed for themselves: a difference of long sums would
    lose what is small beside them.

    Args:
        g: Logarithms of each token's decay [... Q].
    """
    later = _later(g)
    between = g[..., :, None].where(later, 0).cumsum(-2).masked_fill(later.mT, -torch.inf).exp()
    return g.cumsum(-1).exp(), between


def decays_backward(carried: Tensor, between: Tensor, dcarried: Tensor, dbetween: Tensor) -> Tensor:
    """The gradient of ``g``, from decays and their gradients."""
    # Token l's decay is in all from before it, or from a token before it, to it or a later one.
    logs = (between * dbetween).tril(-1)
    behind = (carried * dcarried)[..., None]
    sums = torch.cat((behind, logs), dim=-1).flip(-2).cumsum(-2).flip(-2)
    return (sums[..., 1:] * _later(carried)).sum(-1) + sums[..., 0]


def _later(like: Tensor) -> Tensor:
    """Whether the first of two tokens comes later [Q Q]."""
    count = like.shape[-1]
    return torch.ones(count, count, dtype=torch.bool, device=like.device).tril(-1)
