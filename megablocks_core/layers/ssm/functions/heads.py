"""Between tokens cut over ranks and heads cut over ranks: each rank scans whole sequences.

Context parallelism by all-to-all (DeepSpeed-Ulysses, arXiv:2309.14509): behind it a rank has all
tokens of its heads, in the order of the sequence, and whatever needs the whole runs as in one
process.

Dimensions: B rows, L tokens of the whole sequence, l of this rank, H heads, h = H / n of a rank,
G groups of heads, n ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megablocks_core.groups import all_to_all
from megablocks_core.parallel.sequence import SequenceCut


def to_heads(*tensors: Tensor, cut: SequenceCut) -> tuple[Tensor, ...]:
    """This rank's heads of every token, from every head of this rank's tokens.

    One all-to-all for all tensors of a dtype, of B l H features of each less what stays; in
    backward its reverse.

    Args:
        *tensors: [B l H ...]; the numbers of heads, and what follows, may differ.
        cut: Who holds which tokens, of any kind.

    Returns:
        Of each its [B L h ...], the heads [rank * h, (rank + 1) * h).

    Raises:
        ValueError: A tensor does not have this rank's tokens, or its heads do not divide over
            the ranks.
    """
    n = cut.group.size
    for x in tensors:
        if x.dim() < 3 or x.shape[1] != cut.local_length or x.shape[2] % n:
            raise ValueError(
                f"x of shape {tuple(x.shape)} must have the {cut.local_length} tokens of this "
                f"rank on dim 1, and on dim 2 heads that divide evenly over {n} ranks"
            )
    return _by_dtype(_to_heads, tensors, cut)


def to_tokens(*tensors: Tensor, cut: SequenceCut) -> tuple[Tensor, ...]:
    """Every head of this rank's tokens, from this rank's heads of every token.

    The reverse of ``to_heads``, at the same cost.

    Args:
        *tensors: [B L h ...].
        cut: Who holds which tokens, of any kind.

    Returns:
        Of each its [B l H ...].

    Raises:
        ValueError: A tensor does not have all tokens.
    """
    for x in tensors:
        if x.dim() < 3 or x.shape[1] != cut.length:
            raise ValueError(
                f"x of shape {tuple(x.shape)} must have {cut.length} tokens on dim 1, and heads"
            )
    return _by_dtype(_to_tokens, tensors, cut)


def repeat_groups(x: Tensor, *, cut: SequenceCut, num_heads: int) -> Tensor:
    """Groups of heads repeated until they divide over the ranks [B l G' ...].

    G' is the least common multiple of G and n. Each rank then has the groups of its own heads, of
    which some may lie on other ranks too: what ``to_heads`` cuts so is right for heads cut alike.
    Backward sums the gradients of a group's copies.

    Args:
        x: [B l G ...], such as B and C of Mamba-2.
        cut: Who holds which tokens.
        num_heads: H, of which H / G neighbours share a group.

    Raises:
        ValueError: G or n does not divide ``num_heads``.
    """
    groups, n = x.shape[2], cut.group.size
    if num_heads % groups or num_heads % n:
        raise ValueError(
            f"num_heads={num_heads} must divide evenly into {groups} groups and over {n} ranks"
        )
    times = math.lcm(groups, n) // groups
    return x if times == 1 else x.repeat_interleave(times, dim=2)


def _by_dtype(
    move: Callable[[list[Tensor], SequenceCut], list[Tensor]],
    tensors: Sequence[Tensor],
    cut: SequenceCut,
) -> tuple[Tensor, ...]:
    """Move tensors, all of one dtype at once."""
    if cut.group.size == 1:
        return tuple(tensors)
    moved = list(tensors)
    for dtype in dict.fromkeys(x.dtype for x in tensors):
        indices = [index for index, x in enumerate(tensors) if x.dtype == dtype]
        results = move([tensors[index] for index in indices], cut)
        for index, result in zip(indices, results, strict=True):
            moved[index] = result
    return tuple(moved)


def _to_heads(tensors: list[Tensor], cut: SequenceCut) -> list[Tensor]:
    n, rows, length = cut.group.size, tensors[0].shape[0], _length(cut)
    sizes = [math.prod(x.shape[2:]) // n for x in tensors]
    flat = [x.reshape(rows, length, n, size) for x, size in zip(tensors, sizes, strict=True)]
    sent = torch.cat(flat, dim=3).permute(2, 1, 0, 3).flatten(0, 1)
    arrived = all_to_all(sent, send=[length] * n, receive=cut.local_lengths, group=cut.group)
    whole = cut.in_order(arrived, 0).movedim(0, 1)
    return [
        part.reshape(rows, cut.length, x.shape[2] // n, *x.shape[3:])
        for x, part in zip(tensors, whole.split(sizes, dim=2), strict=True)
    ]


def _to_tokens(tensors: list[Tensor], cut: SequenceCut) -> list[Tensor]:
    n, rows, length = cut.group.size, tensors[0].shape[0], _length(cut)
    sizes = [math.prod(x.shape[2:]) for x in tensors]
    flat = [x.reshape(rows, cut.length, size) for x, size in zip(tensors, sizes, strict=True)]
    sent = cut.by_rank(torch.cat(flat, dim=2).movedim(1, 0), 0)
    arrived = all_to_all(sent, send=cut.local_lengths, receive=[length] * n, group=cut.group)
    mine = arrived.unflatten(0, (n, length)).permute(2, 1, 0, 3)
    return [
        part.reshape(rows, length, n * x.shape[2], *x.shape[3:])
        for x, part in zip(tensors, mine.split(sizes, dim=3), strict=True)
    ]


def _length(cut: SequenceCut) -> int:
    """This rank's tokens, counted anew: torch 2.13 cannot compile a split that an object holds."""
    return cut.local_length_of(cut.group.rank)
