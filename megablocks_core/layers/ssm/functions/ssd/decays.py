"""Decays inside chunks: exponentials of sums that neither overflow nor become denormal.

What decays below ``vanishing`` counts as nothing. Products of denormal numbers are a hundred times
slower on CPUs, and so are exponentials that underflow.

Dimensions: n chunks of b rows, q tokens of a chunk, H heads.
"""

from math import exp
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import threshold


class Borders(NamedTuple):
    """Which tokens of chunks belong to what is outside.

    Attributes:
        enters: Those of the document of the token before the chunk [n 1 1 q].
        leaves: Those of the document of the chunk's last token [n 1 1 q].
        passes: Whether one document goes through the chunk from its start to its end [n 1 1].
    """

    enters: Tensor
    leaves: Tensor
    passes: Tensor


class Documents(NamedTuple):
    """Which tokens of chunks belong together.

    Attributes:
        apart: Pairs of tokens of which the second is not earlier in one document, [n 1 1 q q] or
            alike in all chunks [q q].
        borders: ``None`` if all chunks are of one document.
    """

    apart: Tensor
    borders: Borders | None


class Decays(NamedTuple):
    """Decays of a span of chunks.

    Attributes:
        sums: Logarithms, from the chunk's start through each token [n b H q].
        low, unlow: The exponential of what rounding has taken from ``sums``, and its inverse.
        enter: How much of the state before the chunk is left at each token.
        leave: How much of each token is left in the state behind the chunk.
        passing: How much of the state before the chunk is left behind it [n b H].
    """

    sums: Tensor
    low: Tensor
    unlow: Tensor
    enter: Tensor
    leave: Tensor
    passing: Tensor


def between(sums_nbhq: Tensor, out: Tensor) -> None:
    """Put exp(sums_i - sums_j) of each pair of tokens in ``out`` [n b h q q].

    It lacks the factor low_i unlow_j; pairs i < j hold a number between 0 and 1.
    """
    floor = vanishing(out.dtype)
    torch.sub(sums_nbhq[..., :, None], sums_nbhq[..., None, :], out=out)
    threshold(out.clamp_(floor, 0.0).exp_(), exp(floor) * 1.01, 0.0, inplace=True)


def vanishing(dtype: torch.dtype) -> float:
    """The logarithm of a decay that leaves nothing."""
    return -600.0 if dtype == torch.float64 else -60.0


def decay_of(log: Tensor) -> Tensor:
    """``exp(log)``, and zero below what vanishes."""
    floor = vanishing(log.dtype)
    return threshold(log.clamp(min=floor).exp(), exp(floor) * 1.01, 0.0)


def decays_of(dt_nbHq: Tensor, A_H: Tensor, documents: Documents) -> Decays:
    """Decays of chunks whose steps are ``dt``.

    A token that leaves nothing is as good as one that leaves less, so that sums stay small; they
    are added up in float64, and what float32 cannot hold of them is given beside.
    """
    kind = dt_nbHq.dtype
    log_nbHq = (dt_nbHq * A_H[:, None]).clamp_(min=vanishing(kind) - 1.0)
    sums64 = log_nbHq.cumsum(-1, dtype=torch.float64)
    sums = sums64.to(kind)
    low = (sums64 - sums).to(kind)
    enter = decay_of(sums)
    leave = decay_of((sums64[..., -1:] - sums64).to(kind))
    passing = enter[..., -1]
    if documents.borders is not None:
        enters, leaves, passes = documents.borders
        enter, leave, passing = enter * enters, leave * leaves, passing * passes
    return Decays(sums, low.exp(), low.neg().exp_(), enter, leave, passing)


def causal(length: int, device: torch.device) -> Documents:
    """Chunks of ``length`` tokens that all belong together."""
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return Documents(ones.triu(), None)


def parted(document_nq: Tensor, before_n: Tensor) -> Documents:
    """Chunks whose tokens are of the documents told, as are those before each chunk."""
    last_n1 = document_nq[:, -1:]
    earlier = causal(document_nq.shape[1], document_nq.device).apart
    apart = (document_nq[:, :, None] != document_nq[:, None, :]) | earlier
    borders = Borders(
        (document_nq == before_n[:, None])[:, None, None],
        (document_nq == last_n1)[:, None, None],
        (last_n1 == before_n[:, None])[:, None],
    )
    return Documents(apart[:, None, None], borders)
