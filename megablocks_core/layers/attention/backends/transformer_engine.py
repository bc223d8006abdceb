"""Attention by ``DotProductAttention`` of transformer-engine.

Dimensions: B rows, T queries, S keys, N query heads, K key and value heads, D and W features of
keys and values of a head.
"""

from functools import lru_cache
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from megablocks_core.layers.attention.backends.boundaries import (
    Boundaries,
    without_gradient,
    zero_outside,
)
from megablocks_core.layers.attention.spec import AttentionSpec
from megablocks_core.parallel.optional import imported


def attention(q_BTND: Tensor, k_BSKD: Tensor, v_BSKW: Tensor, spec: AttentionSpec) -> Tensor:
    """Attention [B T N W]; which kernel computes it is transformer-engine's choice.

    Sinks take the place of the module's own parameter, so that gradients come to them. Sends
    nothing. Saved for backward: q, k, v, the result, and one float a token and head.

    Raises:
        ImportError: ``transformer_engine`` is missing.
    """
    module = _module(
        imported("transformer_engine.pytorch", "DotProductAttention", extra="te"),
        q_BTND.shape[2],
        (q_BTND.shape[3], v_BSKW.shape[3]),
        k_BSKD.shape[2],
        spec.scale,
        "vanilla" if spec.sinks is None else "learnable",
    )
    left, right = (-1 if size is None else size for size in spec.window)
    options: dict[str, Any] = {"window_size": (left, 0 if spec.mask == "causal" else right)}
    tensors = (q_BTND, k_BSKD, v_BSKW)
    bounds = None
    if spec.cu_seqlens is None:
        options["qkv_format"] = "bshd"
        causal = "causal" if q_BTND.shape[1] == k_BSKD.shape[1] else "causal_bottom_right"
        options["attn_mask_type"] = causal if spec.mask == "causal" else "no_mask"
    else:
        bounds = Boundaries(spec, q_BTND.shape[1])
        tensors = tuple(without_gradient(x[0], bounds.outside_T) for x in tensors)
        options |= _documents(bounds)
        options["attn_mask_type"] = "padding_causal" if spec.mask == "causal" else "padding"
    own = {} if spec.sinks is None else {"softmax_offset": spec.sinks.float()}
    y = functional_call(module, own, tensors, options)
    y = y.unflatten(-1, (q_BTND.shape[2], -1))
    return y if bounds is None else zero_outside(y, bounds.outside_T).unsqueeze(0)


def _documents(bounds: Boundaries) -> dict[str, Any]:
    longest = bounds.longest()
    return {
        "qkv_format": "thd",
        "cu_seqlens_q": bounds.cu_seqlens,
        "cu_seqlens_kv": bounds.cu_seqlens,
        "cu_seqlens_q_padded": bounds.places,
        "cu_seqlens_kv_padded": bounds.places,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
        # Left out, it is found by a read on the host.
        "pad_between_seqs": bounds.padded,
    }


@lru_cache(maxsize=64)
def _module(
    build: Any,
    heads: int,
    widths: tuple[int, int],
    kv_heads: int,
    scale: float | None,
    softmax_type: str,
) -> nn.Module:
    """A module without state of ours: it is made once for each kind of layer."""
    return build(
        heads,
        widths if widths[0] != widths[1] else widths[0],
        num_gqa_groups=kv_heads,
        softmax_scale=scale,
        softmax_type=softmax_type,
    )
