"""How a vocabulary is cut over a group, agreed by all ranks before work that sends messages.

Dimensions: N tokens, V the whole vocabulary, H features; v is this rank's share of V.
"""

import zlib
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from megablocks_core.groups import Group, chunk_slice
from megablocks_core.groups.messages import finish_all_gather, start_all_gather

# What no checksum is.
_REFUSED = -1


class Columns(NamedTuple):
    """Columns of the whole vocabulary that this rank holds.

    Attributes:
        first: The index of its first one.
        own: How many are real; those behind them are padding.
        widest: The most real ones that any rank holds.
        whole: V.
    """

    first: int
    own: int
    widest: int
    whole: int


def agree_on_columns(
    rows_vH: Tensor,
    indices: Tensor,
    counts: Tensor,
    *,
    vocab_size: int | None,
    group: Group,
    names: tuple[str, str],
    work: str = "",
) -> Columns:
    """This rank's columns, once all ranks have heard each other's sizes and indices.

    Sends six integers a rank, and the host waits for them. Whatever does not fit raises on
    every rank, and so does what a rank has refused before (``refuse``).

    Args:
        rows_vH: What is cut over the ranks, one row a column.
        indices: Indices into the whole vocabulary, equal on every rank.
        counts: Which of them count, alike on every rank; broadcast to ``indices``.
        vocab_size: V, if known. Columns are cut by ``torch.chunk``'s rule, or all ranks hold
            the same number of them and those from V on are padding. Without it all are real.
        group: The ranks.
        names: What the caller calls the rows and the indices.
        work: What is about to be computed, alike on every rank.

    Raises:
        ValueError: The rows are no such share, or equal on all ranks and thus whole already;
            indices differ between ranks or do not lie in the vocabulary; the work differs, or
            another rank refused its part of it.
    """
    what_is_cut, what_points = names
    words_R6 = _heard(_words(rows_vH, indices, counts, work), group)
    _require_same_work([words[5] for words in words_R6], work, group)
    widths = [words[0] for words in words_R6]
    step = _step(widths, vocab_size, what_is_cut)
    whole = sum(widths) if vocab_size is None else vocab_size
    prints = {words[4] for words in words_R6}
    if vocab_size is None and group.size > 1 and len(prints) == 1 and prints != {0}:
        raise ValueError(
            f"{what_is_cut} must be this rank's share of the vocabulary and not the whole one: "
            "equal on all ranks"
        )
    low, high = min(words[1] for words in words_R6), max(words[2] for words in words_R6)
    if low < 0 or high >= max(whole, 1):
        raise ValueError(
            f"{what_points} must lie in the vocabulary of {whole} entries; found "
            f"{low if low < 0 else high}"
        )
    if len({words[3] for words in words_R6}) > 1:
        raise ValueError(f"{what_points} must be equal on all ranks of the group")
    firsts = [min(first, whole) for first in _firsts(widths, step)]
    owns = [min(width, whole - first) for width, first in zip(widths, firsts, strict=True)]
    return Columns(firsts[group.rank], owns[group.rank], max(owns), whole)


def refuse(group: Group, device: torch.device) -> None:
    """Tell ranks that are in ``agree_on_columns``, or will be, that this one raises instead."""
    if not torch.compiler.is_compiling():
        _heard(torch.full((6,), _REFUSED, device=device), group)


def _require_same_work(numbers: list[int], work: str, group: Group) -> None:
    if _REFUSED in numbers:
        who = group.ranks[numbers.index(_REFUSED)]
        raise ValueError(f"arguments must fit on all ranks; rank {who} has refused its own")
    if len(set(numbers)) > 1:
        raise ValueError(
            f"shapes and options must be alike on all ranks of the group; on rank "
            f"{group.ranks[group.rank]}: {work}"
        )


def _words(rows_vH: Tensor, indices: Tensor, counts: Tensor, work: str) -> Tensor:
    """Width, smallest and largest index, and numbers that stand for indices, rows and work."""
    counting_N = torch.where(counts, indices.long(), 0).reshape(-1)
    low, high = torch.cat([counting_N.new_zeros(1), counting_N]).aminmax()
    marked_N = torch.where(counts, indices.long() + 1, 0).reshape(-1)
    places_N = torch.arange(len(marked_N), device=marked_N.device)
    checksum = ((places_N * 2 + 1) * marked_N).sum()
    width = torch.full_like(checksum, rows_vH.shape[0])
    same_work = torch.full_like(checksum, zlib.crc32(work.encode()))
    return torch.stack([width, low, high, checksum, _fingerprint(rows_vH), same_work])


def _fingerprint(rows_vH: Tensor) -> Tensor:
    """Bits that are equal for equal rows; 0 where the rows are constant, and say nothing."""
    ends = rows_vH[:: max(rows_vH.shape[0] - 1, 1)].reshape(-1).double()
    if ends.numel() < 2:
        return torch.zeros((), dtype=torch.int64, device=rows_vH.device)
    total = (ends * torch.arange(len(ends), device=ends.device).double().cos()).sum()
    says_nothing = (ends.min() == ends.max()) | ~total.isfinite()
    return torch.where(says_nothing, 0.0, total).view(torch.int64)


def _heard(words: Tensor, group: Group) -> list[list[int]]:
    if group.size == 1:
        return [words.tolist()]
    sizes = [1] * group.size
    flying = start_all_gather(words.unsqueeze(0), dim=0, group=group, sizes=sizes)
    return finish_all_gather(flying, dim=0, sizes=sizes).tolist()


def _step(widths: list[int], vocab_size: int | None, rows: str) -> int | None:
    """How far apart the ranks' first columns are; ``None`` if one follows the other."""
    size = len(widths)
    if vocab_size is None:
        return None
    cuts = [chunk_slice(vocab_size, size, rank) for rank in range(size)]
    if widths == [cut.stop - cut.start for cut in cuts]:
        return -(-vocab_size // size)
    width = widths[0]
    alike = len(set(widths)) == 1 and width * size >= vocab_size
    if not alike or (width >= vocab_size and size > 1):
        raise ValueError(
            f"{rows} has {widths} rows on the ranks of the group, which must be the shares of "
            f"vocab_size={vocab_size}, or be padded alike on all; is it whole already?"
        )
    return width


def _firsts(widths: list[int], step: int | None) -> list[int]:
    if step is None:
        return list(accumulate(widths[:-1], initial=0))
    return [step * rank for rank in range(len(widths))]
