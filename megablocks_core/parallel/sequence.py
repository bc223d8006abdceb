"""How a sequence is cut over a group: one plan for tokens, labels, positions and every layer.

Dimensions: L tokens of the whole sequence, l of this rank, E documents, n ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megablocks_core.groups import LOCAL, Group, check_group, chunk_slice, gather_from, scatter_to
from megablocks_core.parallel.checks import check_tensors, check_whole, require

KINDS = ("contiguous", "zigzag")

# Digests are whole numbers that float32 holds; factors and a prime spread neighbouring plans.
_DIGESTS, _PRIME = 1 << 24, (1 << 31) - 1
_SPREAD = (9_973_451, 48_271, 69_621)


class SequenceCut:
    """Which tokens of a sequence each rank of ``group`` holds.

    ========== ============================================================================
    kind       this rank's pieces, in the order in which it holds them
    ========== ============================================================================
    contiguous one: chunk ``rank`` of n
    zigzag     two: chunks ``rank`` and ``2 n - 1 - rank`` of 2 n, so that ranks see equally
               many earlier tokens (what causal attention costs)
    ========== ============================================================================

    Chunks follow ``torch.chunk``: the last ones may be shorter, or empty. Over a group of one
    every kind is the whole sequence in one piece. Lengths and pieces are plain numbers;
    ``cu_seqlens`` is never read on the host, but on the CPU, where its values are checked. All
    ranks must make the cut with the same arguments, which ``check_alike`` compares.

    Attributes:
        length: Tokens of the whole sequence.
        cu_seqlens: Sums of the documents' lengths, from 0 [E+1], or ``None``. Tokens behind the
            last document are a document of their own.
        group: The ranks.
        kind: How it is cut.
        pieces: (start, stop) of each of this rank's pieces.
        local_length: Tokens of this rank, l.
        positions: The place of each of this rank's tokens in its document, or without documents
            in the sequence, int64 [l].
        local_cu_seqlens: The parts of the documents that this rank holds, as sums of their
            lengths: E parts for the first piece, then E for the second; empty ones stand for
            documents of which a piece has nothing [pieces * E + 1]. ``None`` without documents.

    Raises:
        ValueError: ``length`` is negative, ``kind`` unknown, or ``cu_seqlens`` no vector of
            integers that starts at 0, never falls, and ends at ``length`` or before.
    """

    def __init__(
        self,
        length: int,
        *,
        cu_seqlens: Tensor | None = None,
        group: Group = LOCAL,
        kind: str = "contiguous",
        device: torch.device | str | None = None,
    ) -> None:
        """Plan the cut; ``device`` is that of the positions, default that of ``cu_seqlens``."""
        check_group(group)
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r} must be one of {', '.join(KINDS)}")
        if not torch.compiler.is_compiling():
            check_whole("length", length, least=0)
        check_cu_seqlens(cu_seqlens, length)
        self.length, self.cu_seqlens, self.group, self.kind = length, cu_seqlens, group, kind
        self.pieces = self.pieces_of(group.rank)
        self.local_length = self.local_length_of(group.rank)
        if device is None and cu_seqlens is not None:
            device = cu_seqlens.device
        index = [torch.arange(start, stop, device=device) for start, stop in self.pieces]
        self.positions = _places(torch.cat(index), cu_seqlens)
        self.local_cu_seqlens = _joined(cu_seqlens, self.pieces)

    def require(self, *kinds: str, by: str) -> None:
        """Raise unless the cut is of one of ``kinds``: a layer says here which ones it serves.

        Raises:
            ValueError: It is of another kind; ``by`` is the layer's name.
        """
        if self.kind not in kinds and self.group.size > 1:
            raise ValueError(f"kind={self.kind!r} of the cut must be {' or '.join(kinds)} for {by}")

    def digest(self, like: Tensor) -> Tensor:
        """A whole number below 2^24 that tells cuts apart, exact in the dtype of ``like`` [].

        Layers put it into a message that they send anyway, to find ranks that cut otherwise.
        """
        plan = (2 * self.length + KINDS.index(self.kind)) * _SPREAD[0] % _DIGESTS
        digest = like.new_full((), plan, dtype=torch.int64)
        if self.cu_seqlens is not None:
            sums = self.cu_seqlens.to(like.device, torch.int64)
            places = torch.arange(1, len(sums) + 1, device=like.device)
            mixed = (sums * _SPREAD[1] + places * _SPREAD[2]) % _PRIME
            digest = digest + (mixed * mixed % _PRIME).sum()  # squares: shifts do not cancel
        return (digest % _DIGESTS).to(like.dtype)

    def check_alike(self) -> None:
        """Compare the ranks' cuts: one all-gather of a number, which the host waits for.

        Raises:
            ValueError: On every rank, if a rank's has another length, kind or other documents.
        """
        device = None if self.cu_seqlens is None else self.cu_seqlens.device
        own = self.digest(torch.zeros((), dtype=torch.float64, device=device))
        sizes = [1] * self.group.size
        self.require_digests(gather_from(own[None], dim=0, group=self.group, sizes=sizes))

    def require_digests(self, digests: Tensor) -> None:
        """Raise unless these, which ranks sent, are all that of this cut.

        Raises:
            ValueError: On the CPU; elsewhere, and compiled, see ``checks.require``.
        """
        rule = "must be made with the same length, kind and cu_seqlens on every rank"
        same = (digests == self.digest(digests)).all()
        require(same, f"cut {rule}", lambda: f"cut={self} {rule}")

    def pieces_of(self, rank: int) -> list[tuple[int, int]]:
        """(start, stop) of each piece of ``rank``."""
        n = self.group.size
        if not torch.compiler.is_compiling():
            check_whole("rank", rank, least=0, most=n - 1)
        if self.kind == "contiguous" or n == 1:
            chunks = [chunk_slice(self.length, n, rank)]
        else:
            chunks = [chunk_slice(self.length, 2 * n, index) for index in (rank, 2 * n - 1 - rank)]
        return [(chunk.start, chunk.stop) for chunk in chunks]

    def local_length_of(self, rank: int) -> int:
        """How many tokens ``rank`` holds."""
        return sum(stop - start for start, stop in self.pieces_of(rank))

    @property
    def local_lengths(self) -> list[int]:
        """How many tokens each rank holds."""
        return [self.local_length_of(rank) for rank in range(self.group.size)]

    @property
    def order(self) -> list[tuple[int, int]]:
        """(rank, index of its piece) of every piece, in the order of the sequence."""
        ranks = list(range(self.group.size))
        first = [(rank, 0) for rank in ranks]
        return first + [(rank, 1) for rank in reversed(ranks) if len(self.pieces) > 1]

    @property
    def neighbours(self) -> list[tuple[int | None, int | None]]:
        """For each piece the ranks that hold the token before it and the token behind it.

        ``None`` stands where the sequence begins or ends.
        """
        return [
            (
                self._rank_of(start - 1) if start > 0 else None,
                self._rank_of(stop) if stop < self.length else None,
            )
            for start, stop in self.pieces
        ]

    def piece_cu_seqlens(self, index: int) -> Tensor | None:
        """The sums of the lengths that the documents have in a piece [E+1]; ``None`` without."""
        if not torch.compiler.is_compiling():
            check_whole("index", index, least=0, most=len(self.pieces) - 1)
        return None if self.cu_seqlens is None else _inside(self.cu_seqlens, *self.pieces[index])

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """This rank's tokens of a whole that all ranks hold alike; backward all-gathers.

        Raises:
            ValueError: ``x`` has not L tokens on ``dim``.
        """
        x = self.by_rank(x, dim)
        return scatter_to(x, dim=dim, group=self.group, sizes=self.local_lengths)

    def unshard(self, x: Tensor, dim: int) -> Tensor:
        """The whole in its order, on every rank; backward keeps this rank's tokens.

        The right one where all ranks go on with the whole alike (``gather_from``).

        Raises:
            ValueError: ``x`` has not l tokens on ``dim``.
        """
        _check_tokens(x, dim, self.local_length)
        x = gather_from(x, dim=dim, group=self.group, sizes=self.local_lengths)
        return self.in_order(x, dim)

    def by_rank(self, x: Tensor, dim: int) -> Tensor:
        """A whole in the order of the sequence, as the tokens of rank 0, of rank 1, and so on."""
        _check_tokens(x, dim, self.length)
        if len(self.pieces) == 1:
            return x
        parts = [
            x.narrow(dim, start, stop - start)
            for rank in range(self.group.size)
            for start, stop in self.pieces_of(rank)
        ]
        return torch.cat(parts, dim)

    def in_order(self, x: Tensor, dim: int) -> Tensor:
        """What ``by_rank`` gives, back in the order of the sequence."""
        _check_tokens(x, dim, self.length)
        if len(self.pieces) == 1:
            return x
        places = [(rank, index) for rank in range(self.group.size) for index in range(2)]
        lengths = [stop - start for start, stop in map(self._piece, places)]
        parts = dict(zip(places, x.split(lengths, dim), strict=True))
        return torch.cat([parts[place] for place in self.order], dim)

    def _piece(self, place: tuple[int, int]) -> tuple[int, int]:
        rank, index = place
        return self.pieces_of(rank)[index]

    def _rank_of(self, token: int) -> int:
        """The rank that holds this token."""
        chunk = -(-self.length // len(self.order))
        return self.order[token // chunk][0]

    def __repr__(self) -> str:
        return f"SequenceCut({self.length}, group={self.group}, kind={self.kind!r})"


def check_cu_seqlens(cu_seqlens: Tensor | None, length: int) -> None:
    """Refuse sums of lengths that do not describe documents in ``length`` tokens.

    Values are looked at where that costs no wait: on the CPU, outside of compilers.

    Raises:
        ValueError: They are no vector of integers that starts at 0, never falls, and ends at
            ``length`` or before.
    """
    if cu_seqlens is None:
        return
    if not isinstance(cu_seqlens, Tensor):
        raise ValueError(f"cu_seqlens={cu_seqlens!r} must be a tensor")
    kind = cu_seqlens.dtype
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or kind not in (torch.int32, torch.int64):
        raise ValueError(
            f"cu_seqlens of shape {tuple(cu_seqlens.shape)} and {kind} must be a vector of at "
            "least two integers"
        )
    hidden = torch.compiler.is_compiling() or isinstance(cu_seqlens, FakeTensor)
    if hidden or cu_seqlens.device.type != "cpu":
        return
    if cu_seqlens[0] != 0 or cu_seqlens[-1] > length or (cu_seqlens.diff() < 0).any():
        raise ValueError(
            f"cu_seqlens={cu_seqlens.tolist()} must start at 0, never fall, and end within "
            f"{length} tokens"
        )


def _places(index: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """How many tokens of its document stand before each token of these places in the whole."""
    if cu_seqlens is None:
        return index
    starts = cu_seqlens.long()
    return index - starts[torch.searchsorted(starts, index, right=True) - 1]


def _inside(cu_seqlens: Tensor, start: int, stop: int) -> Tensor:
    """The sums of the lengths that documents have between two places [E+1]."""
    return cu_seqlens.clamp(start, stop) - start


def _joined(cu_seqlens: Tensor | None, pieces: list[tuple[int, int]]) -> Tensor | None:
    """The documents' parts in one piece after the other, as sums of their lengths."""
    if cu_seqlens is None:
        return None
    joined = _inside(cu_seqlens, *pieces[0])
    for piece in pieces[1:]:
        joined = torch.cat((joined, joined[-1:] + _inside(cu_seqlens, *piece)[1:]))
    return joined


def _check_tokens(x: Tensor, dim: int, length: int) -> None:
    check_tensors(x=x)
    if not isinstance(dim, int) or not -x.dim() <= dim < x.dim() or x.shape[dim] != length:
        raise ValueError(
            f"dim={dim!r} of x, whose shape is {tuple(x.shape)}, must have {length} tokens"
        )
