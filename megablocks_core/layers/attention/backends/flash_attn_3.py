"""Attention by version 3 of flash-attention, the module ``flash_attn_interface``.

Dimensions: B rows, T queries, S keys, N query heads, K key and value heads, D features of a head.
"""

from importlib import import_module
from typing import Any

from torch import Tensor

from megablocks_core.layers.attention.backends.boundaries import (
    Boundaries,
    without_gradient,
    zero_outside,
)
from megablocks_core.layers.attention.backends.flash_attn import options
from megablocks_core.layers.attention.spec import AttentionSpec


def attention(q_BTND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, spec: AttentionSpec) -> Tensor:
    """Attention [B T N D] by ``flash_attn_func``, or ``flash_attn_varlen_func`` with documents.

    Pads between documents stay where they are. Sends nothing. Saved for backward: q, k, v, the
    result, and one float a token and head.

    Raises:
        ImportError: ``flash_attn_interface`` is missing.
    """
    if spec.cu_seqlens is None:
        return _result(_interface("flash_attn_func")(q_BTND, k_BSKD, v_BSKD, **options(spec)))
    attend = _interface("flash_attn_varlen_func")
    bounds = Boundaries(spec, q_BTND.shape[1])
    longest = bounds.longest()
    used = bounds.lengths if bounds.padded else None
    y_TND: Any = attend(
        *(without_gradient(x[0], bounds.outside_T) for x in (q_BTND, k_BSKD, v_BSKD)),
        cu_seqlens_q=bounds.places,
        cu_seqlens_k=bounds.places,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        seqused_q=used,
        seqused_k=used,
        **options(spec),
    )
    return zero_outside(_result(y_TND), bounds.outside_T).unsqueeze(0)


def _result(given: Any) -> Tensor:
    # Some builds give the logarithms of denominators too.
    return given[0] if isinstance(given, tuple) else given


def _interface(name: str) -> Any:
    try:
        return getattr(import_module("flash_attn_interface"), name)
    except ImportError as error:
        raise ImportError(
            "backend='flash_attn_3' needs flash_attn_interface, which no extra installs: build it "
            "in the folder hopper of Dao-AILab/flash-attention"
        ) from error
