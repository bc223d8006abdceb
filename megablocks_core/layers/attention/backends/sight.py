"""Which keys a query sees by its place.

Dimensions: T queries, S keys.
"""

import torch
from torch import Tensor

from megablocks_core.layers.attention.spec import AttentionSpec


def first_seeing(tokens: int, keys: int, spec: AttentionSpec) -> int:
    """How many queries, the first ones, see no key at all."""
    right = spec.limits[1]
    if keys == 0:
        return tokens
    return 0 if right is None else min(max(tokens - keys - right, 0), tokens)


def hidden_keys(
    queries: tuple[int, int],
    keys: tuple[int, int],
    spec: AttentionSpec,
    *,
    offset: int,
    device: torch.device,
) -> Tensor | None:
    """What a stretch of queries does not see of a stretch of keys [T S]; ``None`` for nothing.

    Query t stands at the place of key t + ``offset``.
    """
    left, right = spec.limits
    if left is None and right is None:
        return None
    places_T = torch.arange(queries[0] + offset, queries[1] + offset, device=device)
    ahead_TS = torch.arange(*keys, device=device) - places_T.unsqueeze(1)
    behind_TS = None if right is None else ahead_TS > right
    before_TS = None if left is None else ahead_TS < -left
    if behind_TS is None or before_TS is None:
        return before_TS if behind_TS is None else behind_TS
    return behind_TS | before_TS
