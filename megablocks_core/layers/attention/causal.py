"""Causal attention by torch's fused kernels, over whole rows or over packed documents.

No mask is built: documents that share a row are attended to one by one. Where probabilities
are dropped (``dropping``) they are computed in the open, which is slower and takes their room.

Dimensions: B rows, T tokens, N query heads, K key and value heads, D features of a head,
E documents.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megablocks_core.layers.attention.dropping import Dropped, attend_dropping


def causal_attention(
    q_BTND: Tensor,
    k_BTKD: Tensor,
    v_BTKD: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_padded: Tensor | None = None,
    dropped: Dropped | None = None,
) -> Tensor:
    """``softmax(q k^T / sqrt(D)) v`` over the tokens up to each one's own: [B T N D].

    ``K`` divides ``N``; neighbouring query heads share a key head. With documents the batch
    is one row, and the result is what the documents give one by one. Tokens of no document
    give zero and receive no gradient. The boundaries are read on the host. Sends nothing.
    Saved for backward: q, k, v, the result and one float a token and head; compiled with
    documents q, k and v only, and the product is computed again. With ``dropped`` they are what
    ``attend_dropping`` says.

    Args:
        q_BTND: Queries.
        k_BTKD: Keys.
        v_BTKD: Values.
        cu_seqlens: Sums of the documents' lengths, from 0 [E+1].
        cu_seqlens_padded: Where documents are stored, if pads lie between them: the sums of
            their lengths with pads [E+1].
        dropped: Which probabilities are dropped.

    Raises:
        ValueError: Documents with more than one row, documents that are longer than their
            place or than the row, or ``cu_seqlens_padded`` without ``cu_seqlens``.
    """
    if cu_seqlens is None:
        if cu_seqlens_padded is not None:
            raise ValueError("cu_seqlens_padded must come with cu_seqlens")
        return _attend(q_BTND, k_BTKD, v_BTKD, dropped)
    if q_BTND.shape[0] != 1:
        raise ValueError(f"cu_seqlens must come with one row of tokens, not {q_BTND.shape[0]}")
    places = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
    if torch.compiler.is_compiling():
        p, stream, index_BTN = dropped or (0.0, "", None)
        return _packed_op(q_BTND, k_BTKD, v_BTKD, cu_seqlens, places, index_BTN, p, stream)
    pieces = _pieces(cu_seqlens, places, q_BTND.shape[1])
    return _packed(q_BTND, k_BTKD, v_BTKD, pieces, dropped)


def document_positions(
    num_tokens: int, cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None = None
) -> Tensor:
    """Each token's place in its document, or in the rest of the row after the last, int64 [T]."""
    places = (cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded).long()
    index_T = torch.arange(num_tokens, device=places.device)
    return index_T - places[torch.searchsorted(places, index_T, right=True) - 1]


def _attend(q_BTND: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, dropped: Dropped | None) -> Tensor:
    if dropped is not None:
        return attend_dropping(q_BTND, k_BTKD, v_BTKD, dropped)
    q, k, v = (x.transpose(1, 2) for x in (q_BTND, k_BTKD, v_BTKD))
    grouped = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)


def _packed(
    q_BTND: Tensor,
    k_BTKD: Tensor,
    v_BTKD: Tensor,
    pieces: Sequence[int],
    dropped: Dropped | None,
) -> Tensor:
    """Attention over pieces of the row that are a document, pads, a document, pads, ..."""
    outputs = []
    # One split and one concatenation: a slice per document would write a whole row of zeros
    # for each of them in backward.
    splits = (x.split(list(pieces), dim=1) for x in (q_BTND, k_BTKD, v_BTKD))
    drops = _split_dropped(dropped, pieces)
    for index, (q, k, v, drop) in enumerate(zip(*splits, drops, strict=True)):
        # The first document is attended to even if empty: a row of pads has gradients too, zeros.
        if index == 0 or q.shape[1]:
            outputs.append(_attend(q, k, v, drop) if index % 2 == 0 else torch.zeros_like(q))
    return torch.cat(outputs, dim=1)


def _split_dropped(dropped: Dropped | None, pieces: Sequence[int]) -> Sequence[Dropped | None]:
    if dropped is None:
        return [None] * len(pieces)
    words = dropped.index_BTN.split(list(pieces), dim=1)
    return [dropped._replace(index_BTN=piece) for piece in words]


def _pieces(cu_seqlens: Tensor, places: Tensor, num_tokens: int) -> list[int]:
    """Lengths of document, pads, document, pads, ..., up to the end of the row."""
    sums, starts = cu_seqlens.tolist(), places.tolist()
    if len(sums) != len(starts) or sums[0] != 0 or starts[0] != 0:
        raise ValueError(
            f"cu_seqlens={sums} and cu_seqlens_padded={starts} must pair and start at 0"
        )
    pieces = []
    for index, length in enumerate(b - a for a, b in zip(sums, sums[1:], strict=False)):
        room = starts[index + 1] - starts[index]
        if not 0 <= length <= room:
            raise ValueError(
                f"cu_seqlens={sums} must not fall and its documents must fit their places {starts}"
            )
        pieces += [length, room - length]
    if starts[-1] > num_tokens:
        raise ValueError(f"cu_seqlens={starts} must end within the row of {num_tokens} tokens")
    return [*pieces, 0, num_tokens - starts[-1]]


# The compiler cannot follow a loop over lengths that only the data knows, so it sees one
# operator; a new packing then costs no compilation.


@torch.library.custom_op("megablocks_core::packed_attention", mutates_args=())
def _packed_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    places: Tensor,
    index: Tensor | None,
    p: float,
    stream: str,
) -> Tensor:
    dropped = None if index is None else Dropped(p, stream, index)
    return _packed(q, k, v, _pieces(cu_seqlens, places, q.shape[1]), dropped).contiguous()


@torch.library.custom_op("megablocks_core::packed_attention_backward", mutates_args=())
def _packed_backward_op(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    places: Tensor,
    index: Tensor | None,
    p: float,
    stream: str,
) -> tuple[Tensor, Tensor, Tensor]:
    pieces = _pieces(cu_seqlens, places, q.shape[1])
    dropped = None if index is None else Dropped(p, stream, index)
    pull = torch.func.vjp(lambda q, k, v: _packed(q, k, v, pieces, dropped), q, k, v)[1]
    dq, dk, dv = (grad.contiguous() for grad in pull(dy))
    return dq, dk, dv


@_packed_op.register_fake
def _(q: Tensor, *others: Any) -> Tensor:
    return q.new_empty(q.shape)


@_packed_backward_op.register_fake
def _(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.p, ctx.stream = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    grads = _packed_backward_op(dy, *ctx.saved_tensors, ctx.p, ctx.stream)
    return (*grads, None, None, None, None, None)


_packed_op.register_autograd(_backward, setup_context=_save)
