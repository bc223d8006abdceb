"""Causal attention over whole rows or over packed documents, by this library and torch.

Dimensions: B rows, T tokens, N query heads, K key and value heads, D features of a head,
E documents.
"""

import torch
from torch import Tensor

from megablocks_core.layers.attention.choice import attention
from megablocks_core.layers.attention.dropping import Dropped
from megablocks_core.layers.attention.spec import AttentionSpec


def causal_attention(
    q_BTND: Tensor,
    k_BTKD: Tensor,
    v_BTKD: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_padded: Tensor | None = None,
    dropped: Dropped | None = None,
) -> Tensor:
    """``attention`` with a causal mask and torch's fused kernels: [B T N D].

    Saved for backward: q, k, v, the result and one float a token and head; compiled with
    documents q, k and v only, and the product is computed again. With ``dropped`` it is computed
    in the open, which is slower and takes its room.

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
    spec = AttentionSpec(
        cu_seqlens=cu_seqlens, cu_seqlens_padded=cu_seqlens_padded, dropout=dropped
    )
    return attention(q_BTND, k_BTKD, v_BTKD, spec, backend="naive" if dropped else "sdpa")


def document_positions(
    num_tokens: int, cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None = None
) -> Tensor:
    """Each token's place in its document, or in the rest of the row after the last, int64 [T]."""
    places = (cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded).long()
    index_T = torch.arange(num_tokens, device=places.device)
    return index_T - places[torch.searchsorted(places, index_T, right=True) - 1]
