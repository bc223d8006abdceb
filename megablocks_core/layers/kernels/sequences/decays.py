"""Decays of chunks, which the kernels of the scan read.

Dimensions: B rows, L tokens in c chunks of q, H heads.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

# The logarithm of a decay that leaves nothing in float32; one token cannot leave less.
_NOTHING = -61.0


class Decays(NamedTuple):
    """Of the tokens of every chunk; places behind the row's end have steps of zero.

    Attributes:
        dt: Steps [B H c q].
        high, low: Sums of logarithms from the chunk's start on, and what float32 cannot hold of
            them [B H c q].
        enter: How much of the state before the chunk is left at each token [B H c q].
        leave: How much of each token is left in the state behind the chunk [B H c q].
        passing: How much of the state before the chunk is left behind it [B H c].
        document: Of each token [c q], if there are several.
    """

    dt: Tensor
    high: Tensor
    low: Tensor
    enter: Tensor
    leave: Tensor
    passing: Tensor
    document: Tensor | None


def decays_of(dt_BLH: Tensor, A_H: Tensor, document_L: Tensor | None, size: int) -> Decays:
    """Decays of chunks of ``size`` tokens. Sums are taken in float64."""
    length = dt_BLH.shape[1]
    number = -(-length // size)
    behind = (0, number * size - length)
    dt = pad(dt_BLH.float().transpose(1, 2), behind).unflatten(2, (number, size)).contiguous()
    log = (dt * A_H.float()[:, None, None]).clamp_(min=_NOTHING)
    sums = log.cumsum(-1, dtype=torch.float64)
    high = sums.float()
    low = (sums - high).float()
    enter = high.exp()
    leave = (sums[..., -1:] - sums).float().exp_()
    passing = enter[..., -1]
    if document_L is None:
        return Decays(dt, high, low, enter, leave, passing.contiguous(), None)
    document = torch.cat((document_L, document_L[-1:].expand(behind[1]))).view(number, size)
    last = document[:, -1:]
    before = torch.cat((document[:1, :1], last[:-1]))
    passing = passing * (last == before)[:, 0]
    return Decays(
        dt, high, low, enter * (document == before), leave * (document == last), passing, document
    )


def gradients_of_decays(
    dsums: Tensor, dt: Tensor, A_H: Tensor, length: int
) -> tuple[Tensor, Tensor]:
    """Gradients in dt [B L H] and A [H] that come from those of sums of logarithms [B H c q]."""
    dlog = dsums.double().flip(-1).cumsum(-1).flip(-1)
    dA_H = (dlog * dt).sum((0, 2, 3))
    ddt_BHL = (dlog * A_H[:, None, None]).flatten(2)[..., :length]
    return ddt_BHL.transpose(1, 2), dA_H
