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


class Terms(NamedTuple):
    """Terms of outputs and states times their gradients, by the decays that are in them.

    Sums of what is there, no differences, so that small gradients keep their digits.

    Attributes:
        crossing: Of pairs j < k <= i, for each token k of a chunk [B H c q].
        read: Of what a token takes from the state before the chunk [B H c q].
        left: Of what it leaves in the state behind the chunk [B H c q].
        passed: Of what the state before the chunk leaves there [B H c].
    """

    crossing: Tensor
    read: Tensor
    left: Tensor
    passed: Tensor


def crossing_of(rows: Tensor, columns: Tensor) -> Tensor:
    """Sums over pairs j < k <= i of a matrix of t by t tiles of r, for every k [... t*r].

    Args:
        rows: Sums of the rows of tiles below the diagonal; on it the sums over pairs of one tile
            [... t t r].
        columns: Sums of the columns of tiles below the diagonal [... t t r].
    """
    tiles = rows.shape[-2]
    found = rows.diagonal(dim1=-3, dim2=-2).mT.double().clone()
    for one in range(tiles):
        for other in range(one):
            row, column = rows[..., one, other, :].double(), columns[..., one, other, :].double()
            found[..., one, :] += row.flip(-1).cumsum(-1).flip(-1)
            found[..., other, 1:] += column[..., :-1].cumsum(-1)
            found[..., other + 1 : one, :] += row.sum(-1)[..., None, None]
    return found.flatten(-2)


def gradients_of_decays(
    terms: Terms, dt: Tensor, A_H: Tensor, length: int
) -> tuple[Tensor, Tensor]:
    """Gradients in dt [B L H] and A [H] that come through decays, from their ``terms``."""
    dlog = terms.crossing.double() + terms.passed[..., None]
    dlog += terms.read.double().flip(-1).cumsum(-1).flip(-1)
    # A decay is in what earlier tokens leave, and not in what its own does.
    dlog[..., 1:] += terms.left[..., :-1].double().cumsum(-1)
    dA_H = (dlog * dt).sum((0, 2, 3))
    ddt_BHL = (dlog * A_H[:, None, None]).flatten(2)[..., :length]
    return ddt_BHL.transpose(1, 2), dA_H
