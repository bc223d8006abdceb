"""Attention in the open: the plain twin of all others, and the one that drops probabilities.

Dimensions: B rows, T queries, S keys, N query heads, K key and value heads, D and W features of
keys and values of a head, R = T N / K.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from megablocks_core.layers.attention.backends.sight import first_seeing, hidden_keys
from megablocks_core.layers.attention.spec import AttentionSpec
from megablocks_core.parallel import dropout


def attend(q_BTND: Tensor, k_BSKD: Tensor, v_BSKW: Tensor, spec: AttentionSpec) -> Tensor:
    """Attention over whole rows [B T N W], with all products in memory.

    A probability's fate depends on its query's word and the key's place in the row, from 0 on.
    At least float32 inside. Sends nothing. Saved for backward: q, k, v, the words, and two
    numbers for each query, key and head.
    """
    first = first_seeing(q_BTND.shape[1], k_BSKD.shape[1], spec)
    if first:
        seeing = _attend(q_BTND[:, first:], k_BSKD, v_BSKW, spec, first)
        return pad(seeing, (0, 0, 0, 0, first, 0))
    return _attend(q_BTND, k_BSKD, v_BSKW, spec, 0)


def _attend(q_BTND: Tensor, k_BSKD: Tensor, v_BSKW: Tensor, spec: AttentionSpec, first: int):
    tokens, (keys, num_kv_heads) = q_BTND.shape[1], k_BSKD.shape[1:3]
    q, k, v = (x.transpose(1, 2) for x in (q_BTND, k_BSKD, v_BSKW))
    scale = q.shape[-1] ** -0.5 if spec.scale is None else spec.scale
    # Queries that share a key head are rows of one product: keys are not repeated.
    rows_BKRD = (q * scale).unflatten(1, (num_kv_heads, -1)).flatten(2, 3)
    scores_BNTS = (rows_BKRD @ k.mT).view(*q.shape[:3], keys)
    if spec.soft_cap is not None:
        scores_BNTS = spec.soft_cap * (scores_BNTS / spec.soft_cap).tanh()
    hidden_TS = hidden_keys((0, tokens), (0, keys), spec, offset=keys - tokens, device=q.device)
    if hidden_TS is not None:
        scores_BNTS = scores_BNTS.masked_fill(hidden_TS, float("-inf"))
    kept_BNTS = _probabilities(scores_BNTS, spec.sinks)
    if spec.dropout is not None:
        p, stream, index_BTN = spec.dropout
        index_BNT = index_BTN[:, first:].transpose(1, 2)
        kept_BNTS = dropout(kept_BNTS, p, stream=stream, index=index_BNT)
    kept_BKRS = kept_BNTS.to(v.dtype).view(*rows_BKRD.shape[:3], keys)
    return (kept_BKRS @ v).view(*q.shape[:3], v.shape[-1]).transpose(1, 2)


def _probabilities(scores_BNTS: Tensor, sinks_N: Tensor | None) -> Tensor:
    inside = torch.promote_types(scores_BNTS.dtype, torch.float32)
    if sinks_N is None:
        return scores_BNTS.softmax(-1, dtype=inside)
    sinks_BNT1 = sinks_N.to(inside).view(-1, 1, 1).expand(*scores_BNTS.shape[:3], 1)
    return torch.cat((scores_BNTS.to(inside), sinks_BNT1), -1).softmax(-1)[..., :-1]
