"""Context parallelism by heads: a rank scans whole sequences of its own heads.

Dimensions: B rows, L tokens of the whole sequence, l of this rank, H heads, G groups of heads, C
channels of all of them, n ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megablocks_core.groups import Group, check_group
from megablocks_core.layers.ssm.functions.heads import repeat_groups, to_heads
from megablocks_core.parallel import SequenceCut

Context = Literal["states", "heads"]


class Part(NamedTuple):
    """Packed channels that belong to heads or to groups of heads.

    Attributes:
        heads: H or G.
        features: Channels of each.
    """

    heads: int
    features: int


def check_context(context: Context, num_heads: int, *, tp: Group, cp: Group) -> None:
    """Raise unless heads can be cut over ``cp`` in this way.

    Raises:
        ValueError: ``context`` is unknown, or the heads of a tensor-parallel rank do not divide
            evenly over ``cp``.
    """
    check_group(cp)
    if context not in ("states", "heads"):
        raise ValueError(f"context={context!r} must be 'states' or 'heads'")
    if context == "heads" and num_heads % (tp.size * cp.size):
        raise ValueError(
            f"num_heads={num_heads} must divide evenly over tp times cp, "
            f"{tp.size} x {cp.size} ranks"
        )


def channels_to_heads(
    channels: Tensor, parts: Sequence[Part], *others: Tensor, num_heads: int, cut: SequenceCut
) -> tuple[Tensor, ...]:
    """This rank's heads of every token, of packed channels and of other tensors.

    One all-to-all a dtype, and its reverse in backward. Groups of which there are too few are sent
    to several ranks.

    Args:
        channels: [B l C].
        parts: How channels are packed.
        *others: One number a head [B l H].
        num_heads: H.
        cut: Who holds which tokens.

    Returns:
        [B L c], packed as before, and [B L h] of each other.
    """
    split = channels.split([part.heads * part.features for part in parts], dim=-1)
    heads = [x.unflatten(-1, part) for x, part in zip(split, parts, strict=True)]
    heads = [repeat_groups(x, cut=cut, num_heads=num_heads) for x in heads]
    moved = to_heads(*heads, *(x[..., None] for x in others), cut=cut)
    own = torch.cat([x.flatten(-2) for x in moved[: len(parts)]], dim=-1)
    return own, *(x.squeeze(-1) for x in moved[len(parts) :])


def rows_of_heads(weight: Tensor, parts: Sequence[Part], cp: Group) -> Tensor:
    """The rows [c ...] of packed weights [C ...] for the heads that ``channels_to_heads`` gives."""
    own = []
    split = weight.split([part.heads * part.features for part in parts])
    for rows, part in zip(split, parts, strict=True):
        times = math.lcm(part.heads, cp.size) // part.heads
        heads = rows.unflatten(0, part).repeat_interleave(times, dim=0)
        own.append(heads.chunk(cp.size)[cp.rank].flatten(0, 1))
    return torch.cat(own)
