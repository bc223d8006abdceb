"""Attention by this library and torch over documents of one row, one document after another.

The compiler cannot follow loops over lengths that only the data knows, or that change, so it sees
one operator; a new packing then costs no compilation.

Dimensions: B rows, T tokens, N query heads, K key and value heads, D and W features of keys and
values of a head, E documents.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megablocks_core.layers.attention.backends import naive, sdpa
from megablocks_core.layers.attention.backends.boundaries import pieces_of
from megablocks_core.layers.attention.dropping import Dropped
from megablocks_core.layers.attention.spec import AttentionSpec

Attend = Callable[[Tensor, Tensor, Tensor, AttentionSpec], Tensor]
_ATTEND: dict[str, Attend] = {"naive": naive.attend, "sdpa": sdpa.attend}


def attention(
    q_BTND: Tensor, k_BSKD: Tensor, v_BSKW: Tensor, spec: AttentionSpec, *, by: str
) -> Tensor:
    """Attention over whole rows or the documents of one [B T N W].

    ``by`` is "naive" or "sdpa", of which each says what it keeps. With documents the result is
    what they give one by one; tokens of no document give zero and receive no gradient. The
    boundaries are read on the host. Compiled with documents, a window, or more keys than queries
    or fewer, q, k, v and sinks are saved for backward, and the product is computed again.
    """
    uneven = spec.window != (None, None) or q_BTND.shape[1] != k_BSKD.shape[1]
    if torch.compiler.is_compiling() and (uneven or spec.cu_seqlens is not None):
        return _operator(q_BTND, k_BSKD, v_BSKW, spec, by)
    return _attention(q_BTND, k_BSKD, v_BSKW, spec, by)


def _attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, by: str) -> Tensor:
    if spec.cu_seqlens is None:
        return _ATTEND[by](q, k, v, spec)
    places = spec.cu_seqlens if spec.cu_seqlens_padded is None else spec.cu_seqlens_padded
    return _packed(q, k, v, spec, pieces_of(spec.cu_seqlens, places, q.shape[1]), by)


def _packed(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, pieces: Sequence[int], by: str
) -> Tensor:
    """Attention over pieces of the row that are a document, pads, a document, pads, ..."""
    outputs = []
    # One split and one concatenation: a slice per document would write a whole row of zeros
    # for each of them in backward.
    splits = (x.split(list(pieces), dim=1) for x in (q, k, v))
    alone = replace(spec, cu_seqlens=None, cu_seqlens_padded=None, max_seqlen=None)
    drops = _split_dropped(spec.dropout, pieces)
    for index, (q, k, v, drop) in enumerate(zip(*splits, drops, strict=True)):
        # The first document is attended to even if empty: a row of pads has gradients too, zeros.
        if index % 2 == 0 and (index == 0 or q.shape[1]):
            outputs.append(_ATTEND[by](q, k, v, replace(alone, dropout=drop)))
        elif q.shape[1]:
            outputs.append(v.new_zeros(*q.shape[:3], v.shape[-1]))
    return torch.cat(outputs, dim=1)


def _split_dropped(dropped: Dropped | None, pieces: Sequence[int]) -> Sequence[Dropped | None]:
    if dropped is None:
        return [None] * len(pieces)
    words = dropped.index_BTN.split(list(pieces), dim=1)
    return [dropped._replace(index_BTN=piece) for piece in words]


def _operator(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, by: str) -> Tensor:
    p, stream, index = spec.dropout or (0.0, "", None)
    tensors = (q, k, v, spec.sinks, spec.cu_seqlens, spec.cu_seqlens_padded, index)
    # Operators take no None in a list of numbers: -1 is no limit.
    window = [-1 if size is None else size for size in spec.window]
    return _op(*tensors, spec.mask, window, spec.soft_cap, spec.scale, p, stream, by)


def _spec_of(
    sinks: Tensor | None,
    cu_seqlens: Tensor | None,
    padded: Tensor | None,
    index: Tensor | None,
    *options: Any,
) -> tuple[AttentionSpec, str]:
    mask, (left, right), soft_cap, scale, p, stream, by = options
    spec = AttentionSpec(
        mask=mask,
        cu_seqlens=cu_seqlens,
        cu_seqlens_padded=padded,
        window=(None if left < 0 else left, None if right < 0 else right),
        soft_cap=soft_cap,
        sinks=sinks,
        scale=scale,
        dropout=None if index is None else Dropped(p, stream, index),
    )
    return spec, by


@torch.library.custom_op("megablocks_core::packed_attention", mutates_args=())
def _op(  # noqa: PLR0913 (operators take no dataclasses)
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_seqlens: Tensor | None,
    padded: Tensor | None,
    index: Tensor | None,
    mask: str,
    window: list[int],
    soft_cap: float | None,
    scale: float | None,
    p: float,
    stream: str,
    by: str,
) -> Tensor:
    spec, by = _spec_of(
        sinks, cu_seqlens, padded, index, mask, window, soft_cap, scale, p, stream, by
    )
    return _attention(q, k, v, spec, by).contiguous()


@torch.library.custom_op("megablocks_core::packed_attention_backward", mutates_args=())
def _backward_op(  # noqa: PLR0913 (operators take no dataclasses)
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_seqlens: Tensor | None,
    padded: Tensor | None,
    index: Tensor | None,
    mask: str,
    window: list[int],
    soft_cap: float | None,
    scale: float | None,
    p: float,
    stream: str,
    by: str,
) -> list[Tensor]:
    spec, by = _spec_of(
        sinks, cu_seqlens, padded, index, mask, window, soft_cap, scale, p, stream, by
    )
    given = (q, k, v) if sinks is None else (q, k, v, sinks)
    pull = torch.func.vjp(
        lambda q, k, v, *sink: _attention(
            q, k, v, replace(spec, sinks=sink[0] if sink else None), by
        ),
        *given,
    )[1]
    return [gradient.contiguous() for gradient in pull(dy)]


@_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[-1])


@_backward_op.register_fake
def _(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *others: Any):
    given = (q, k, v) if sinks is None else (q, k, v, sinks)
    return [x.new_empty(x.shape) for x in given]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.options = inputs[7:]


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _backward_op(dy, *ctx.saved_tensors, *ctx.options)
    return (*gradients, *[None] * (len(ctx.saved_tensors) + len(ctx.options) - len(gradients)))


_op.register_autograd(_backward, setup_context=_save)
