"""Causal attention that drops probabilities, which torch's fused kernels do by their own masks.

Dimensions: B rows, T tokens, N query heads, K key and value heads, D features of a head,
R = T N / K.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megablocks_core.parallel import dropout
from megablocks_core.parallel.counter import bits_of


class Dropped(NamedTuple):
    """Which probabilities are dropped.

    Attributes:
        p: The probability of that.
        stream: Name of the layer.
        index_BTN: A word for each query of each head, from ``index_of_heads`` [B T N].
    """

    p: float
    stream: str
    index_BTN: Tensor


def index_of_heads(index_T: Tensor, heads: slice) -> Tensor:
    """Words for queries in ``heads`` of the whole layer, from words for tokens: [... T n]."""
    numbers_n = torch.arange(heads.start, heads.stop, device=index_T.device)
    return bits_of(index_T.unsqueeze(-1), numbers_n)


def attend_dropping(q_BTND: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, dropped: Dropped) -> Tensor:
    """``dropout(softmax(q k^T / sqrt(D))) v`` over the tokens up to each one's own: [B T N D].

    A probability's fate depends on its query's word and the key's place in the row, from 0 on.
    At least float32 inside. Sends nothing. Saved for backward: q, k, v, the words, and two
    numbers for each query, key and head.
    """
    tokens, num_kv_heads = q_BTND.shape[1], k_BTKD.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q_BTND, k_BTKD, v_BTKD))
    # Queries that share a key head are rows of one product: keys are not repeated.
    rows_BKRD = (q * q.shape[-1] ** -0.5).unflatten(1, (num_kv_heads, -1)).flatten(2, 3)
    scores_BNTT = (rows_BKRD @ k.mT).view(*q.shape[:3], tokens)
    future_TT = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
    inside = torch.promote_types(q.dtype, torch.float32)
    kept_BNTT = dropout(
        scores_BNTT.masked_fill(future_TT, float("-inf")).softmax(-1, dtype=inside),
        dropped.p,
        stream=dropped.stream,
        index=dropped.index_BTN.transpose(1, 2),
    )
    kept_BKRT = kept_BNTT.to(v.dtype).view(*rows_BKRD.shape[:3], tokens)
    return (kept_BKRT @ v).view(q.shape).transpose(1, 2)
