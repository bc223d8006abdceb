"""Mamba-2's scan, chunk by chunk (state-space duality, arXiv:2405.21060, section 6).

Dimensions: B rows, L tokens, H heads in G groups, P features of a head, N features of a state,
E documents.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from megablocks_core.layers.ssm.functions.arguments import (
    check_arguments,
    check_groups_of_heads,
    check_shapes,
)
from megablocks_core.layers.ssm.functions.documents import check_documents
from megablocks_core.layers.ssm.functions.passing import documents_of, over_cut
from megablocks_core.layers.ssm.functions.ssd.pieces import Piece, scan_piece, state_map
from megablocks_core.parallel.checks import check_flags, check_whole
from megablocks_core.parallel.sequence import SequenceCut


def ssd_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cut: SequenceCut | None = None,
    return_final_state: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """``s = exp(dt A) s + dt x B^T``; ``y = s C + D x``, of every head.

    Computed in at least float32, also under autocast; a decay below exp(-60) (exp(-600) in
    float64) counts as none left. Kept for backward are the arguments, the state before every
    eighth chunk (before each, with documents whose final states are wanted), and 8 bytes a token
    that tell its document; backward computes chunks again, and so does it what reduces tokens to
    a state under a cut. Its twin is ``ssd_recurrence``, and one token's step ``ssd_step``. Sends
    nothing but, under a cut, what ``over_cut`` does: one all-gather of [B H] decays and [B H P N]
    states, and in backward one reduce-scatter.

    Where ``mamba_ssm``'s ``mamba_chunk_scan_combined`` differs:

    ========================== =================================================================
    theirs                     here
    ========================== =================================================================
    dt_bias, dt_softplus,      ``dt`` as it is used:
    dt_limit                   ``softplus(dt.float() + dt_bias).clamp(*dt_limit)``
    z                          ``y * silu(z)`` of what is given
    seq_idx                    ``cu_seqlens``
    initial_states             ``initial_state``; with documents one for each, not for each row
    return_final_states        ``return_final_state``; with documents those of all
    cu_seqlens,                ``cu_seqlens``, ``return_final_state``
    return_varlen_states
    chunk_size                 any whole number from 1 on, not a power of 2; it changes nothing
    x, dt, A, B, C, D          the same
    ========================== =================================================================

    Args:
        x: [B L H P], or this rank's tokens of it.
        dt: Step sizes, after softplus [B L H].
        A: Rates of decay, negative [H].
        B: Input matrix of each group of H / G neighbouring heads [B L G N].
        C: Output matrix of each group [B L G N].
        D: Weight of the input in the output [H], or of each feature [H P].
        chunk_size: Tokens that meet in one matrix.
        initial_state: The states before rows [B H P N] or documents [E H P N]; default zeros.
        cu_seqlens: Sums of the documents' lengths, from 0 [E+1], of one row. What stands behind
            the last one is a document of its own.
        cut: How ranks hold the sequence. It tells the documents.
        return_final_state: Else ``None`` is given in its place, and nothing of its size is made.

    Returns:
        ``y`` [B L H P] of x's dtype, and the state behind the last token of each row or document,
        like ``initial_state``; that of an empty document is its initial one.

    Raises:
        ValueError: Shapes do not fit, ``chunk_size`` is no whole number from 1 on, heads are not
            equally many in each group, ``cu_seqlens`` does not describe one row of documents, or
            comes beside a cut.
    """
    optional = {"D": D, "initial_state": initial_state}
    check_arguments(optional, cu_seqlens=cu_seqlens, x=x, dt=dt, A=A, B=B, C=C)
    _check(x, dt, A, B, C, D)
    check_whole("chunk_size", chunk_size, least=1)
    check_flags(return_final_state=return_final_state)
    sums = documents_of(cut, cu_seqlens, tokens=x.shape[1])
    _check_state(initial_state, x, B, sums)
    piece = Piece(A, D, chunk_size, initial_state, return_final_state)
    with torch.autocast(x.device.type, enabled=False):
        if cut is not None and cut.group.size > 1:
            return over_cut(
                (x, dt, B, C),
                cut=cut,
                state_map=partial(state_map, piece),
                scan=partial(scan_piece, piece),
                compose=torch.mul,
                initial_state=initial_state,
            )
        check_documents(sums, rows=x.shape[0], length=x.shape[1])
        return scan_piece(piece, x, dt, B, C, cu_seqlens=sums)


def _check(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None) -> None:
    if x.dim() != 4:
        raise ValueError(f"x of shape {tuple(x.shape)} must have rows, tokens, heads and features")
    if B.dim() != 4:
        raise ValueError(
            f"B of shape {tuple(B.shape)} must have rows, tokens, groups and features of a state"
        )
    rows, length, heads, features = x.shape
    groups, states = B.shape[2:]
    if not heads * features * states:
        raise ValueError(
            f"x of {heads} heads of {features} features and B of {states} must have at least one"
        )
    check_groups_of_heads(groups, heads)
    check_shapes(
        dt=(dt, (rows, length, heads)),
        A=(A, (heads,)),
        B=(B, (rows, length, groups, states)),
        C=(C, (rows, length, groups, states)),
        D=(D, (heads,) if D is None or D.dim() == 1 else (heads, features)),
    )


def _check_state(state: Tensor | None, x: Tensor, B: Tensor, sums: Tensor | None) -> None:
    count = x.shape[0] if sums is None else len(sums) - 1
    check_shapes(initial_state=(state, (count, *x.shape[2:], B.shape[3])))
