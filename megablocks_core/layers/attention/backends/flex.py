"""Attention by torch's ``flex_attention``.

Masks are lists of blocks, found from the blocks' places and documents: none is as large as the
products.

Dimensions: B rows, T queries, S keys, N query heads, K key and value heads, D and W features of
keys and values of a head; P and Q blocks of queries and keys.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from megablocks_core.layers.attention.backends.boundaries import Boundaries, zero_outside
from megablocks_core.layers.attention.spec import AttentionSpec

BLOCK = 128


def attention(q_BTND: Tensor, k_BSKD: Tensor, v_BSKW: Tensor, spec: AttentionSpec) -> Tensor:
    """Attention [B T N W], compiled on CUDA; on the CPU in the open, and without a backward.

    Sends nothing. Saved for backward: q, k, v, the result, and one float a token and head.
    """
    if not q_BTND.shape[1] or not k_BSKD.shape[1]:
        return q_BTND.new_zeros(*q_BTND.shape[:3], v_BSKW.shape[-1])
    bounds = None if spec.cu_seqlens is None else Boundaries(spec, q_BTND.shape[1])
    if bounds is not None:
        # A product with what is not a number is none, seen or not.
        q_BTND, k_BSKD, v_BSKW = (
            zero_outside(x[0], bounds.outside_T).unsqueeze(0) for x in (q_BTND, k_BSKD, v_BSKW)
        )
    q, k, v = (x.transpose(1, 2) for x in (q_BTND, k_BSKD, v_BSKW))
    options: dict[str, Any] = {
        "scale": spec.scale,
        "enable_gqa": q.shape[1] != k.shape[1],
        "block_mask": block_mask(q.shape[2], k.shape[2], spec, bounds, q.device),
    }
    if spec.soft_cap is not None:
        options["score_mod"] = partial(_capped, spec.soft_cap)
    attend = _function(q.is_cuda)
    if spec.sinks is None:
        y = attend(q, k, v, **options)
    else:
        y, aux = attend(q, k, v, return_aux=_logarithms(), **options)
        lse_BNT = aux.lse
        # What the softmax over keys alone makes too much of.
        kept_BNT = (lse_BNT - spec.sinks.to(lse_BNT.dtype).view(-1, 1)).sigmoid()
        y = y * kept_BNT.unsqueeze(-1).to(y.dtype)
    y = y.transpose(1, 2)
    return y if bounds is None else zero_outside(y[0], bounds.outside_T).unsqueeze(0)


def block_mask(
    tokens: int,
    keys: int,
    spec: AttentionSpec,
    bounds: Boundaries | None,
    device: torch.device,
) -> Any:
    """The ``BlockMask`` of a spec, ``None`` for one that hides nothing. Reads nothing."""
    from torch.nn.attention.flex_attention import BlockMask  # loads the compiler

    if spec.limits == (None, None) and bounds is None:
        return None
    left, right = spec.limits
    offset = keys - tokens
    sees = partial(_sees, left, right, offset)
    if bounds is not None:
        sees = partial(_sees_own, left, right, bounds.document_T, bounds.outside_T)
    blocks = seen_blocks(tokens, keys, spec, bounds, device)
    return BlockMask.from_kv_blocks(
        *_listed(blocks.some_PQ & ~blocks.all_PQ),
        *_listed(blocks.all_PQ),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(tokens, keys),
    )


class SeenBlocks(NamedTuple):
    """Which blocks of keys a block of queries sees [P Q].

    Attributes:
        some_PQ: A query of the one may see a key of the other.
        all_PQ: Each query of the one sees all keys of the other.
    """

    some_PQ: Tensor
    all_PQ: Tensor


def seen_blocks(
    tokens: int,
    keys: int,
    spec: AttentionSpec,
    bounds: Boundaries | None,
    device: torch.device,
) -> SeenBlocks:
    """Found from the first and last place and document of each block."""
    left, right = spec.limits
    low_P, high_P = (x.unsqueeze(1) + keys - tokens for x in _edges(tokens, device))
    low_Q, high_Q = _edges(keys, device)
    some_PQ = torch.ones(len(low_P), len(low_Q), dtype=torch.bool, device=device)
    all_PQ = some_PQ.clone()
    if right is not None:
        some_PQ &= low_Q <= high_P + right
        all_PQ &= high_Q <= low_P + right
    if left is not None:
        some_PQ &= high_Q >= low_P - left
        all_PQ &= low_Q >= high_P - left
    if bounds is not None:
        none = len(bounds.places)
        document_T = bounds.document_T.masked_fill(bounds.outside_T, none)
        first = _by_block(document_T, none).amin(-1)
        last = _by_block(document_T.masked_fill(bounds.outside_T, -1), -1).amax(-1)
        only = _by_block(document_T, none).amax(-1)
        some_PQ &= (first.unsqueeze(1) <= last) & (last.unsqueeze(1) >= first)
        single_P = (first == only) & (only < none)
        all_PQ &= single_P.unsqueeze(1) & single_P & (first.unsqueeze(1) == first)
    return SeenBlocks(some_PQ, all_PQ & some_PQ)


def _edges(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    starts = torch.arange(0, length, BLOCK, device=device)
    return starts, (starts + BLOCK - 1).clamp(max=length - 1)


def _by_block(values_T: Tensor, fill: int) -> Tensor:
    return F.pad(values_T, (0, -len(values_T) % BLOCK), value=fill).unflatten(0, (-1, BLOCK))


def _listed(blocks_PQ: Tensor) -> tuple[Tensor, Tensor]:
    """How many, and which first, as ``BlockMask`` has them [1 1 P] and [1 1 P Q]."""
    order_PQ = blocks_PQ.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    return blocks_PQ.sum(-1).int()[None, None], order_PQ.int()[None, None]


def _sees(left: int | None, right: int | None, offset: int, b: Any, h: Any, t: Any, s: Any) -> Any:
    ahead = s - t - offset
    if left is None:
        return ahead <= right
    return ahead >= -left if right is None else (ahead >= -left) & (ahead <= right)


def _sees_own(
    left: int | None,
    right: int | None,
    document_T: Tensor,
    outside_T: Tensor,
    b: Any,
    h: Any,
    t: Any,
    s: Any,
) -> Any:
    own = (document_T[t] == document_T[s]) & ~outside_T[t] & ~outside_T[s]
    return own if left is None and right is None else own & _sees(left, right, 0, b, h, t, s)


def _capped(cap: float, score: Tensor, b: Any, h: Any, t: Any, s: Any) -> Tensor:
    return cap * (score / cap).tanh()


def _logarithms() -> Any:
    from torch.nn.attention.flex_attention import AuxRequest

    return AuxRequest(lse=True)


def _function(compiled: bool) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention  # loads the compiler

    if not compiled or torch.compiler.is_compiling():
        return flex_attention
    return _compiled()


@cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)
