"""Attention by the package ``flash_attn``, version 2.

Dimensions: B rows, T queries, S keys, N query heads, K key and value heads, D features of a head.
"""

from typing import Any

import torch
from torch import Tensor

from megablocks_core.layers.attention.backends.boundaries import (
    Boundaries,
    without_gradient,
    zero_outside,
)
from megablocks_core.layers.attention.spec import AttentionSpec
from megablocks_core.parallel.optional import imported


def attention(q_BTND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, spec: AttentionSpec) -> Tensor:
    """Attention [B T N D] by ``flash_attn_func``, or ``flash_attn_varlen_func`` with documents.

    Where pads lie between documents tokens are brought together before and apart afterwards,
    without a read on the host. Sends nothing. Saved for backward: q, k, v, the result, and one
    float a token and head.

    Raises:
        ImportError: ``flash_attn`` is missing.
    """
    if spec.cu_seqlens is None:
        attend = imported("flash_attn", "flash_attn_func", extra="flash")
        return attend(q_BTND, k_BSKD, v_BSKD, **options(spec))
    attend = imported("flash_attn", "flash_attn_varlen_func", extra="flash")
    bounds = Boundaries(spec, q_BTND.shape[1])
    # Tokens of documents first, in their order; where none is a pad they stand so already.
    order_T = bounds.outside_T.to(torch.uint8).argsort(stable=True) if bounds.padded else None
    tensors = [
        x if order_T is None else x.index_select(0, order_T)
        for x in (without_gradient(x[0], bounds.outside_T) for x in (q_BTND, k_BSKD, v_BSKD))
    ]
    longest = bounds.longest()
    y_TND = attend(
        *tensors,
        cu_seqlens_q=bounds.cu_seqlens,
        cu_seqlens_k=bounds.cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        **options(spec),
    )
    if order_T is not None:
        y_TND = y_TND.index_select(0, order_T.argsort())
    return zero_outside(y_TND, bounds.outside_T).unsqueeze(0)


def options(spec: AttentionSpec) -> dict[str, Any]:
    """What functions of both versions are told of a spec."""
    left, right = (-1 if size is None else size for size in spec.window)
    return {
        "softmax_scale": spec.scale,
        "causal": spec.mask == "causal",
        "window_size": (left, right),
        "softcap": spec.soft_cap or 0.0,
    }
