"""The scan of one contiguous piece of a sequence, and what it makes of the state before it.

Dimensions: B rows, L tokens, H heads in G groups, P features of a head, N features of a state,
E documents.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megablocks_core.layers.ssm.functions.documents import document_of_token
from megablocks_core.layers.ssm.functions.ssd import spoilt
from megablocks_core.layers.ssm.functions.ssd.chunks import Inputs
from megablocks_core.layers.ssm.functions.ssd.document_states import (
    Tokens,
    entries_of_documents,
    final_states_of_documents,
)
from megablocks_core.layers.ssm.functions.ssd.operation import chunked_scan
from megablocks_core.layers.ssm.functions.ssd.reduction import reduced
from megablocks_core.layers.ssm.functions.steps import wide


class Piece(NamedTuple):
    """What is alike in all pieces: arguments of ``ssd_chunk_scan``."""

    A: Tensor
    D: Tensor | None
    chunk_size: int
    initial_state: Tensor | None
    return_final_state: bool


def scan_piece(
    piece: Piece,
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    cu_seqlens: Tensor | None,
    carry: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Outputs [B L H P], and the states behind rows [B H P N] or documents [E H P N].

    Args:
        piece: What is alike in all pieces.
        x, dt, B, C: Its tokens.
        cu_seqlens: Of the documents' parts in the piece.
        carry: State before the piece's first token [B H P N], be it the initial one; default that
            of ``piece`` for what starts there.
    """
    state, kind = piece.initial_state, wide(x)
    if cu_seqlens is None:
        before = state if carry is None else carry
        inputs = Inputs(x, dt, piece.A, B, C, piece.D, None, None)
        y, final, _ = chunked_scan(inputs, before, chunk_size=piece.chunk_size)
        return y, final if piece.return_final_state else None
    if carry is None and state is not None:
        carry = _state_of(state.to(kind), document_of_token(cu_seqlens, 1))
    found = spoilt.find((x, dt, B, C), cu_seqlens, state, carry) if x.shape[1] else None
    if found is not None:
        x, dt, B, C = spoilt.without_bad_tokens((x, dt, B, C))
        state, carry = (spoilt.without_bad_states(each) for each in (state, carry))
    tokens = Tokens(*(part.to(kind) for part in (x[0], dt[0], piece.A, B[0], C[0])))
    added = entries = None
    if state is not None and x.shape[1]:
        added, entries = entries_of_documents(tokens, state.to(kind), cu_seqlens, piece.chunk_size)
    inputs = Inputs(
        x, dt, piece.A, B, C, piece.D, entries, document_of_token(cu_seqlens, x.shape[1])
    )
    y, _, states = chunked_scan(
        inputs, carry, chunk_size=piece.chunk_size, every_chunk=piece.return_final_state
    )
    y = y if added is None else (y + added).to(x.dtype)
    if not piece.return_final_state:
        return (y, None) if found is None else found.put(y, None)
    if x.shape[1] == 0:
        count = len(cu_seqlens) - 1
        empty = x.new_zeros((count, *x.shape[2:], B.shape[3]), dtype=kind)
        return y, empty if state is None else state.to(kind)
    final = final_states_of_documents(tokens, states[:, 0], state, cu_seqlens, piece.chunk_size)
    return (y, final) if found is None else found.put(y, final)


def state_map(
    piece: Piece, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, *, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """How the piece maps the state before it to that behind it: s -> transition s + state.

    Only the document of the last token counts: the transition is zero if it starts behind the
    first token, and its initial state then is in ``state``.

    Returns:
        Transition [B H 1 1] and state [B H P N].
    """
    if cu_seqlens is None or not x.shape[1]:
        whole_BH, state = reduced(x, dt, piece.A, B, None)
        return whole_BH[..., None, None], state
    bad_L = spoilt.bad_tokens((x, dt, B))
    x, dt, B = spoilt.without_bad_tokens((x, dt, B))
    document_L = document_of_token(cu_seqlens, x.shape[1])
    counted_L = document_L == document_L[-1]
    whole_BH, state = reduced(x, dt, piece.A, B, counted_L)
    transition = whole_BH[..., None, None]
    state = state.masked_fill((bad_L & counted_L).any(), torch.nan)
    starts = document_L[0] != document_L[-1]
    if piece.initial_state is not None:
        initial = _state_of(piece.initial_state.to(state.dtype), document_L[-1:])
        state = state + torch.where(starts, transition * initial, 0.0)
    return torch.where(starts, 0.0, transition), state


def _state_of(state: Tensor, document_1: Tensor) -> Tensor:
    """The initial state of one document [1 H P N]; zeros for what stands behind all."""
    return torch.cat((state, torch.zeros_like(state[:1]))).index_select(0, document_1)
