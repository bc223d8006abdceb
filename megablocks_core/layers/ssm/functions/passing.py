"""Recurrences over a sequence that ranks hold in pieces: states and inputs passed between them.

A rank reduces each of its pieces to a transition and a state, which say how the piece changes
whatever state comes in (Mamba-2, arXiv:2405.21060, section 8.2); one message carries those of all
pieces, whose size does not depend on the length; each rank combines those before its own.

Dimensions: B rows, L tokens of the whole sequence, l of this rank, E documents, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megablocks_core.groups import all_gather_to, all_to_all
from megablocks_core.parallel.sequence import SequenceCut

# Called with the tensors of one piece and ``cu_seqlens=``: (transition, state), each [B ...].
StateMap = Callable[..., tuple[Tensor, Tensor]]
# Called with the tensors of one piece, ``cu_seqlens=`` and ``carry=``: (y, final states or None).
Scan = Callable[..., tuple[Tensor, Tensor | None]]


def over_cut(
    tensors: Sequence[Tensor],
    *,
    cut: SequenceCut,
    state_map: StateMap,
    scan: Scan,
    compose: Callable[[Tensor, Tensor], Tensor],
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """A recurrence over the whole sequence, of which ``tensors`` are this rank's tokens.

    One all-gather of every piece's transition and state, and in backward one reduce-scatter. With
    them goes the cut's digest, which tells ranks that cut otherwise. The sum over the ranks of
    ``final_state`` is the whole one, and so is the sum of what they give as gradient of
    ``initial_state`` and of weights.

    Args:
        tensors: [B l ...] each, or [B m l ...] with m entries a token.
        cut: Who holds what.
        state_map: How a piece maps the state before it to the state behind it: ``s`` becomes
            ``compose(transition, s) + state``. It speaks of the last document that has tokens in
            the piece; ``transition`` is zero where that document starts behind the first token.
        scan: The outputs of a piece [B l ...], and the states behind the documents' last tokens
            in it [E ...] (or of the rows [B ...]), or ``None`` for none. ``carry`` [B ...] is the
            state before the piece's first token; for documents that start behind that token
            both functions know the initial states themselves.
        compose: ``torch.mul`` for decays, ``torch.matmul`` for matrices.
        initial_state: Equal on every rank: of the documents [E ...], or the rows [B ...].

    Returns:
        ``y`` [B l ...], and ``final_state``, [E ...] or [B ...]: this rank's where it holds the
        last token, zeros elsewhere. That of an empty document is given by rank 0.

    Raises:
        ValueError: A tensor does not have this rank's tokens, or more than one row of documents, or
            ranks cut otherwise.
    """
    parts = [parts_of(x, cut) for x in tensors]
    pieces = list(zip(*parts, strict=True))
    documents = [cut.piece_cu_seqlens(index) for index in range(len(pieces))]
    maps = [
        state_map(*piece, cu_seqlens=sums) for piece, sums in zip(pieces, documents, strict=True)
    ]
    gathered, every_map = _gather(maps, cut, tensors)
    carries = _carries(every_map, cut, compose, initial_state)
    results = [
        scan(*piece, cu_seqlens=sums, carry=carry)
        for piece, sums, carry in zip(pieces, documents, carries, strict=True)
    ]
    ys = [y for y, _ in results]
    y = ys[0] if len(ys) == 1 else torch.cat(ys, dim=1)
    finals = [final for _, final in results if final is not None]
    if not finals:
        return tied(gathered, y)[0], None
    y, final = tied(gathered, y, final_state(finals, cut=cut, initial_state=initial_state))
    return y, final


def halo(x: Tensor, *, cut: SequenceCut, width: int) -> list[Tensor]:
    """The ``width`` tokens before each of this rank's pieces [B width C], zeros before the first.

    They may belong to other documents, and lie on several ranks if pieces are short. One
    all-to-all of at most ``width`` tokens a piece, and in backward one that sums their gradients;
    one rank has nothing before its piece and sends nothing.

    Args:
        x: This rank's tokens [B l C].
        cut: Who holds what.
        width: How many.

    Raises:
        ValueError: ``x`` does not have this rank's tokens, or more than one row of documents.
    """
    parts = parts_of(x, cut)
    if cut.group.size == 1:
        return [x.new_zeros(x.shape[0], width, x.shape[2])]
    if width == 0:
        return [part[:, :0] for part in parts]
    sent = [_sent(parts, cut, rank, width) for rank in range(cut.group.size)]
    wanted = [
        (rank, place, index, high - low)
        for index, span in enumerate(_before(cut.pieces, width))
        for place, (rank, piece) in enumerate(cut.order)
        for low, high in _overlap(span, cut.pieces_of(rank)[piece])
    ]
    wanted.sort(key=lambda one: (one[0], one[2], one[1]))  # as each rank sends them
    arrived = all_to_all(
        torch.cat(sent, dim=1).movedim(1, 0),
        send=[part.shape[1] for part in sent],
        receive=[sum(n for r, _, _, n in wanted if r == rank) for rank in range(cut.group.size)],
        group=cut.group,
    ).movedim(0, 1)
    found = zip(wanted, arrived.split([length for *_, length in wanted], dim=1), strict=True)
    by_place = sorted(found, key=lambda one: one[0][1])
    return [
        _padded([part for (_, _, i, _), part in by_place if i == index], arrived, width)
        for index in range(len(parts))
    ]


def final_state(
    finals: Sequence[Tensor], *, cut: SequenceCut, initial_state: Tensor | None
) -> Tensor:
    """The state behind the last token of each document, or row, if this rank holds that.

    Zeros stand for the others; rank 0 gives the initial states of empty documents.

    Args:
        finals: From each of this rank's pieces [E ...] or [B ...]. Those of documents that do
            not end in the piece mean nothing.
        cut: Who holds what.
        initial_state: Of the documents; default zeros.
    """
    if cut.cu_seqlens is None:
        last = [start < stop == cut.length for start, stop in cut.pieces]
        last = last if cut.length else [cut.group.rank == 0]
        held = [final for final, here in zip(finals, last, strict=False) if here]
        return held[0] if held else torch.zeros_like(finals[0])
    starts, stops = cut.cu_seqlens[:-1], cut.cu_seqlens[1:]
    total = torch.zeros_like(finals[0])
    if initial_state is not None and cut.group.rank == 0:
        total = _where(starts == stops, initial_state.to(total.dtype), total)
    for final, (start, stop) in zip(finals, cut.pieces, strict=True):
        here = (starts < stops) & (stops > start) & (stops <= stop)
        total = _where(here, final, total)
    return total


def tied(message: Tensor, *results: Tensor) -> tuple[Tensor, ...]:
    """Results as they are, of which each leads backward to the message.

    So no rank whose own results do not depend on a message stays out of the one that answers it.
    """
    return _Tied.apply(message, *results)


def documents_of(
    cut: SequenceCut | None, cu_seqlens: Tensor | None, *, tokens: int
) -> Tensor | None:
    """The sums of documents' lengths: those of the cut where there is one, else ``cu_seqlens``.

    Raises:
        ValueError: The cut is none, does not give this rank so many ``tokens``, or both are given.
    """
    if cut is None:
        return cu_seqlens
    if not isinstance(cut, SequenceCut):
        raise ValueError(f"cut={cut!r} must be a SequenceCut")
    if cu_seqlens is not None:
        raise ValueError("cu_seqlens must not come with a cut, which knows the documents")
    if tokens != cut.local_length:
        raise ValueError(f"cut={cut} must give this rank {tokens} tokens, not {cut.local_length}")
    return cut.cu_seqlens


def parts_of(x: Tensor, cut: SequenceCut) -> list[Tensor]:
    """A tensor's entries in each of this rank's pieces.

    Raises:
        ValueError: ``x`` does not have this rank's tokens, or more than one row of documents.
    """
    if cut.cu_seqlens is not None and x.shape[0] != 1:
        raise ValueError(f"cu_seqlens must come with one row of tokens, not {x.shape[0]}")
    entries = x.shape[1] // cut.local_length if cut.local_length else 1
    if x.shape[1] != entries * cut.local_length:
        raise ValueError(
            f"x of shape {tuple(x.shape)} must have the {cut.local_length} tokens of this rank "
            "on dim 1"
        )
    if len(cut.pieces) == 1:
        return [x]  # a split would cost backward a copy
    return list(x.split([entries * (stop - start) for start, stop in cut.pieces], dim=1))


def _gather(
    maps: list[tuple[Tensor, Tensor]], cut: SequenceCut, tensors: Sequence[Tensor]
) -> tuple[Tensor, Callable[[int, int], tuple[Tensor, Tensor]]]:
    """The message with the maps of all pieces, and a look-up by rank and piece."""
    digest = cut.digest(maps[0][1])[None]
    flat = torch.stack([torch.cat([*(part.reshape(-1) for part in pair), digest]) for pair in maps])
    if not flat.requires_grad:
        # A rank without tokens: its maps are constants, and yet backward must reach the message.
        flat = flat + torch.cat([x.flatten()[:0] for x in tensors]).sum().to(flat.dtype)
    gathered = all_gather_to(flat, dim=0, group=cut.group, sizes=[len(maps)] * cut.group.size)
    cut.require_digests(gathered.detach()[:, -1])
    transition, state = maps[0]

    def of(rank: int, index: int) -> tuple[Tensor, Tensor]:
        row = gathered[rank * len(maps) + index]
        first, second, _ = row.split([transition.numel(), state.numel(), 1])
        return first.view(transition.shape), second.view(state.shape)

    return gathered, of


def _carries(
    every_map: Callable[[int, int], tuple[Tensor, Tensor]],
    cut: SequenceCut,
    compose: Callable[[Tensor, Tensor], Tensor],
    initial_state: Tensor | None,
) -> list[Tensor]:
    """The states before each of this rank's pieces."""
    like = every_map(0, 0)[1]
    state = torch.zeros_like(like)
    if initial_state is not None and cut.cu_seqlens is None:
        state = initial_state.to(like.dtype)
    # Nothing is taken, and yet every rank reads the message: compilers drop the wait for one that
    # is not read, after which ranks may wait for each other.
    state = torch.where(torch.zeros_like(like, dtype=torch.bool), like, state)
    carries = [state] * len(cut.pieces)
    own = [place for place in cut.order if place[0] == cut.group.rank]
    for rank, index in cut.order[: cut.order.index(own[-1]) + 1]:
        start, stop = cut.pieces_of(rank)[index]
        if cut.cu_seqlens is not None:
            state = _entering(state, cut.cu_seqlens, start, initial_state)
        if rank == cut.group.rank:
            carries[index] = state
        if (rank, index) != own[-1]:
            transition, more = every_map(rank, index)
            if cut.cu_seqlens is not None:
                # Zero times what is not finite would go on into the next document.
                starts = (cut.cu_seqlens > start) & (cut.cu_seqlens < stop)
                state = state.masked_fill(starts.any(), 0.0)
            state = compose(transition, state) + more
    return carries


def _entering(
    state: Tensor, cu_seqlens: Tensor, start: int, initial_state: Tensor | None
) -> Tensor:
    """The state before a piece, or the initial one where a document starts at its first token."""
    first = torch.zeros_like(state)
    if initial_state is not None:
        document = (cu_seqlens <= start).sum() - 1
        padded = torch.cat((initial_state.to(state.dtype), first))
        first = padded.index_select(0, document[None])
    return torch.where((cu_seqlens == start).any(), first, state)


def _where(documents: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return torch.where(documents.view(-1, *[1] * (one.dim() - 1)), one, other)


def _sent(parts: list[Tensor], cut: SequenceCut, rank: int, width: int) -> Tensor:
    """The tokens before the pieces of ``rank`` that this rank holds, piece by piece."""
    found = [
        part[:, low - start : high - start]
        for wanted in _before(cut.pieces_of(rank), width)
        for part, (start, stop) in zip(parts, cut.pieces, strict=True)
        for low, high in _overlap(wanted, (start, stop))
    ]
    return torch.cat([parts[0][:, :0], *found], dim=1)


def _before(pieces: list[tuple[int, int]], width: int) -> list[tuple[int, int]]:
    """The places of the ``width`` tokens before each piece; none before an empty one."""
    return [(max(start - width, 0) if start < stop else start, start) for start, stop in pieces]


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> list[tuple[int, int]]:
    low, high = max(one[0], other[0]), min(one[1], other[1])
    return [(low, high)] if low < high else []


def _padded(found: list[Tensor], arrived: Tensor, width: int) -> Tensor:
    """What was found before a piece, behind zeros for what there is not."""
    rows, _, channels = arrived.shape
    zeros = arrived.new_zeros(rows, width - sum(part.shape[1] for part in found), channels)
    # The empty part links ranks that receive nothing to the message that backward sends.
    return torch.cat([zeros, arrived[:, :0], *found], dim=1)


class _Tied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, message: Tensor, *results: Tensor) -> tuple[Tensor, ...]:
        ctx.shape, ctx.dtype, ctx.device = message.shape, message.dtype, message.device
        return tuple(result.view_as(result) for result in results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return torch.zeros(ctx.shape, dtype=ctx.dtype, device=ctx.device), *grads
