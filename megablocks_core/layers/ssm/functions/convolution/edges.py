"""What a convolution knows at the edges of documents: the tokens before and the last ones.

A state is the W - 1 inputs before a token, oldest first. A piece is the tokens [start, stop) of
the whole; the whole is one piece of itself.

Dimensions: B rows, n tokens of a piece, E documents, C channels, W taps.
"""

import torch
from torch import Tensor

from megablocks_core.layers.ssm.functions.convolution.taps import convolve


def carried(initial_state: Tensor, before: Tensor, start: int) -> Tensor:
    """The state before a piece of rows: ``before``, led by what the initial state still gives.

    Args:
        initial_state: [B W-1 C].
        before: The tokens before the piece, zeros for those before the sequence [B W-1 C].
        start: How many tokens the sequence has before the piece.
    """
    missing = max(before.shape[1] - start, 0)
    first = initial_state.shape[1] - missing
    return torch.cat((initial_state[:, first:], before[:, missing:]), dim=1)


def with_initial_states(
    z: Tensor, initial_state: Tensor, weight: Tensor, *, cu_seqlens: Tensor, start: int
) -> Tensor:
    """Outputs of a piece [1 n C], with what the documents' initial states add to their first.

    Args:
        z: Outputs, before any activation, whose windows end where documents begin.
        initial_state: Of every document [E W-1 C].
        weight: [C W].
        cu_seqlens: Sums of the documents' lengths in the whole [E+1].
        start: The piece's first token.
    """
    width, length = initial_state.shape[1], z.shape[1]
    if width == 0 or length == 0:
        return z
    # An initial state followed by zeros: the outputs that it alone would give.
    alone = convolve(torch.zeros_like(initial_state), initial_state, weight, None)
    token = cu_seqlens[:-1, None] + torch.arange(width, device=z.device)
    here = (token < cu_seqlens[1:, None]) & (token >= start) & (token < start + length)
    places = (token - start).clamp(0, length - 1)
    added = torch.where(here[..., None], alone, 0)
    return z.index_add(1, places.flatten(), added.flatten(0, 1)[None])


def last_of_rows(x: Tensor, before: Tensor) -> Tensor:
    """The states behind rows [B n C], ``before`` which stand [B W-1 C]."""
    width, length = before.shape[1], x.shape[1]
    last = torch.cat((before, x[:, max(length - width, 0) :]), dim=1)
    return last[:, last.shape[1] - width :]


def last_of_documents(
    x: Tensor, before: Tensor, initial_state: Tensor | None, *, cu_seqlens: Tensor, start: int
) -> Tensor:
    """The states behind documents whose last token is in a piece [E W-1 C]; others mean nothing.

    Args:
        x: The piece's tokens [1 n C].
        before: Those before it [1 W-1 C].
        initial_state: Of every document [E W-1 C]; default zeros.
        cu_seqlens: Sums of the documents' lengths in the whole [E+1].
        start: The piece's first token.
    """
    width = before.shape[1]
    if width == 0:
        return x.new_zeros(len(cu_seqlens) - 1, 0, x.shape[2])
    tokens = torch.cat((before, x), dim=1)[0]
    first, end = cu_seqlens[:-1, None], cu_seqlens[1:, None]
    token = end - width + torch.arange(width, device=x.device)
    rows = tokens[(token - start + width).clamp(0, len(tokens) - 1)]
    if initial_state is None:
        return torch.where((token >= first)[..., None], rows, 0)
    # How far a document shorter than a window moves its initial state on.
    moved = (token - first + width).clamp(max=width - 1)[..., None].expand_as(rows)
    return torch.where((token >= first)[..., None], rows, initial_state.gather(1, moved))
