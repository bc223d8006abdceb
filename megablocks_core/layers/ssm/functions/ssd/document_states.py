"""States of packed documents: what they start from, and what they end with.

Chunks pass on one state. A document that starts inside one adds its own to the outputs of that
chunk, and to the state behind it; the state of one that ends inside a chunk is told from the state
before the chunk and the chunk's tokens. Only these chunks are looked at, one for each document.
What is before the row's first token comes with the row, not from here.

Dimensions: L tokens, H heads in G groups of J, P features of a head, N features of a state,
E documents, q tokens of a chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megablocks_core.layers.ssm.functions.ssd.decays import decay_of


class Tokens(NamedTuple):
    """One row: x [L H P], dt [L H], A [H], B and C [L G N], in the dtype of states."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor


class _Window(NamedTuple):
    """A chunk for each document.

    Attributes:
        chunk: Its number [E].
        index: Its tokens, the row's last one in place of those behind the row [E q].
        inside: Which of them are of the document [E q].
    """

    chunk: Tensor
    index: Tensor
    inside: Tensor


def entries_of_documents(
    tokens: Tokens, initial_state: Tensor, cu_seqlens: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """What initial states [E H P N] add to outputs [L H P], and behind chunks [chunks 1 H P N]."""
    length, heads, features = tokens.x.shape
    window = _window(cu_seqlens, cu_seqlens[:-1], length, chunk_size)
    sums_EqH = _logs(tokens, window).cumsum(1)
    begins_EqH = window.inside[..., None] & (cu_seqlens[:-1] > 0)[:, None, None]
    decay_EqH = decay_of(sums_EqH.to(tokens.x.dtype)) * begins_EqH
    C_EqGN = tokens.C[window.index]
    grouped = initial_state.unflatten(1, (C_EqGN.shape[2], -1))
    read_EqHP = torch.einsum("eqgn,egjpn->eqgjp", C_EqGN, grouped).flatten(2, 3)
    y_LHP = tokens.x.new_zeros(length, heads, features)
    y_LHP = y_LHP.index_add(
        0, window.index.flatten(), (read_EqHP * decay_EqH[..., None]).flatten(0, 1)
    )
    behind = initial_state * decay_EqH[:, -1, :, None, None]
    entries = tokens.x.new_zeros(-(-length // chunk_size), *initial_state.shape[1:])
    return y_LHP, entries.index_add(0, window.chunk, behind)[:, None]


def final_states_of_documents(
    tokens: Tokens,
    states: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor,
    chunk_size: int,
) -> Tensor:
    """The states [E H P N] behind the last tokens of documents, the initial ones of empty ones.

    Args:
        tokens: Of the row.
        states: The states before each chunk [chunks H P N].
        initial_state: Those before the documents [E H P N], or zeros.
        cu_seqlens: Sums of their lengths.
        chunk_size: Of the states.
    """
    starts, stops = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    empty = starts == stops
    window = _window(cu_seqlens, (stops - 1).clamp(min=0), len(tokens.x), chunk_size)
    sums_EqH = _logs(tokens, window).cumsum(1)
    kind = tokens.x.dtype
    whole_EH = decay_of(sums_EqH[:, -1].to(kind))
    leave_EqH = decay_of((sums_EqH[:, -1:] - sums_EqH).to(kind)) * window.inside[..., None]
    weighed = tokens.x[window.index] * (tokens.dt[window.index] * leave_EqH)[..., None]
    B_EqGN = tokens.B[window.index]
    grouped = weighed.unflatten(2, (B_EqGN.shape[2], -1))
    final = torch.einsum("eqgjp,eqgn->egjpn", grouped, B_EqGN).flatten(1, 2)

    goes_on = ((starts < window.chunk * chunk_size) | (starts == 0)) & ~empty
    begun = torch.zeros_like(final) if initial_state is None else initial_state.to(kind)
    before = torch.where(goes_on[:, None, None, None], states[window.chunk], begun)
    return final + before * whole_EH[..., None, None]


def _window(cu_seqlens: Tensor, token_E: Tensor, length: int, chunk_size: int) -> _Window:
    """The chunks that hold one token of each document; any, with nothing inside, for empty ones."""
    sums = cu_seqlens.long()
    last = max(length - 1, 0)
    chunk = token_E.long().clamp(max=last) // chunk_size
    index = chunk[:, None] * chunk_size + torch.arange(chunk_size, device=sums.device)
    inside = (index >= sums[:-1, None]) & (index < sums[1:, None])
    return _Window(chunk, index.clamp(max=last), inside)


def _logs(tokens: Tokens, window: _Window) -> Tensor:
    """Logarithms of the decays of documents' own tokens in float64 [E q H], 0 for others."""
    log_EqH = (tokens.dt[window.index] * tokens.A).double()
    return torch.where(window.inside[..., None], log_EqH, 0.0)
