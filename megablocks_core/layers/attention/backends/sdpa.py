"""Attention by torch's ``scaled_dot_product_attention``.

Dimensions: B rows, T queries, S keys, N query heads, K key and value heads, D and W features of
keys and values of a head.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from megablocks_core.layers.attention.backends.sight import first_seeing, hidden_keys
from megablocks_core.layers.attention.spec import AttentionSpec

# Queries that share a mask in a windowed row, at least.
_BLOCK = 128
# Features of a head come in multiples of this for fused kernels.
_FEATURES = 8


def attend(q_BTND: Tensor, k_BSKD: Tensor, v_BSKW: Tensor, spec: AttentionSpec) -> Tensor:
    """Attention over whole rows [B T N W].

    Without window, and with as many queries as keys or a full mask, no mask is made. A window
    that is bounded to the left is served block by block: masks are as long as two windows, or
    256. Sends nothing. Saved for backward: q, k, v, the result, one float a token and head, and
    masks; with sinks, q, k and v are wider by 8 features.
    """
    scale = spec.scale
    q, k, v = (x.transpose(1, 2) for x in (q_BTND, k_BSKD, v_BSKW))
    if spec.sinks is not None:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        q, k, v = _with_sinks(q, k, v, spec.sinks / scale)
    tokens, keys = q_BTND.shape[1], k_BSKD.shape[1]
    if spec.limits == (None, None) and keys:
        y = _product(q, k, v, scale=scale)
    elif spec.limits == (None, 0) and tokens == keys:
        # A query of no effect in front sees the sink alone, so that the others see theirs and it.
        front = 0 if spec.sinks is None else 1
        y = _product(pad(q, (0, 0, front, 0)) if front else q, k, v, scale=scale, causal=True)
        y = y[:, :, front:] if front else y
    else:
        y = _by_blocks(q, k, v, spec, keys=keys, scale=scale)
    return (y if spec.sinks is None else y[..., : v_BSKW.shape[-1]]).transpose(1, 2)


def _product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None,
    causal: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )


def _with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A key in front whose product with each query is its head's sink, and whose value is zero.

    It alone has the feature that queries carry their sinks in.
    """
    width = q.shape[-1]
    # Minus infinity would be no number beside the other keys' zeros.
    finite_N = sinks_N.to(q.dtype).clamp(min=torch.finfo(q.dtype).min)
    feature_N = finite_N.view(-1, 1, 1).expand(*q.shape[:3], 1)
    q = torch.cat((q, pad(feature_N, (0, _FEATURES - 1))), -1)
    sink = k.new_zeros(*k.shape[:2], 1, width + _FEATURES)
    sink[..., width] = 1
    k = torch.cat((sink, pad(k, (0, _FEATURES))), 2)
    # Fused kernels want values as wide as keys.
    wider = _FEATURES if v.shape[-1] == width else 0
    return q, k, pad(v, (0, wider, 1, 0))


def _by_blocks(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, *, keys: int, scale: float | None
) -> Tensor:
    """Each block of queries over the keys that one of it sees, under a mask of that size."""
    tokens, sinks = q.shape[2], k.shape[2] - keys
    left, right = spec.limits
    offset, first = keys - tokens, first_seeing(tokens, keys, spec)
    block = tokens if left is None else max(left + (right or 0), _BLOCK)
    # No queries over all keys: queries that see none have gradients too, zeros.
    outputs = [pad(_product(q[:, :, :0], k, v, scale=scale), (0, 0, 0, first))]
    for start in range(first, tokens, max(block, 1)):
        stop = min(start + block, tokens)
        low = 0 if left is None else max(start + offset - left, 0)
        high = keys if right is None else min(stop + offset + right, keys)
        hidden = hidden_keys((start, stop), (low, high), spec, offset=offset, device=q.device)
        seen = None if hidden is None else pad(~hidden, (sinks, 0), value=True)
        own_k, own_v = (
            torch.cat((x[:, :, :1], x[:, :, low + 1 : high + 1]), 2) if sinks else x[:, :, low:high]
            for x in (k, v)
        )
        outputs.append(_product(q[:, :, start:stop], own_k, own_v, scale=scale, mask=seen))
    return torch.cat(outputs if first or len(outputs) == 1 else outputs[1:], 2)
