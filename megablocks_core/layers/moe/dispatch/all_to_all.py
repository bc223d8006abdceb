"""Each token travels to the ranks of its experts, and the results travel back.

Dimensions: t tokens that this rank sends, H features, n places of a piece here, N places of the
experts here, M rows received, q ranks of an expert's features, p ranks of experts, e experts
here, E in all, C places an expert.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from megablocks_core.groups import Group, all_gather_to, reduce_scatter_to
from megablocks_core.groups.exchange import Exchange, start_exchange
from megablocks_core.layers.moe.dispatch.assignment import (
    Order,
    copy_slots,
    cut,
    joined,
    sum_slots,
    take_rows,
)
from megablocks_core.layers.moe.dispatch.counts import Counts
from megablocks_core.layers.moe.dispatch.dispatcher import Dispatched, Pending
from megablocks_core.layers.moe.dispatch.expert_parallel import ExpertParallelDispatcher, Own
from megablocks_core.layers.moe.dispatch.joining import link_to, tied
from megablocks_core.layers.moe.dispatch.pieces import by_piece, count_pieces, widths
from megablocks_core.layers.moe.dispatch.regroup import regroup
from megablocks_core.parallel import remember


class AllToAllDispatcher(ExpertParallelDispatcher):
    """Sends each rank of ``ep`` the rows of its experts, and of no others.

    Inside an expert tokens stand in the order of the ranks of ``ep``, of ``etp``, and of the
    rank's own tokens. The slots of a token are summed on its rank, in their order: the bits do
    not depend on ``ep``. Over ``etp`` the rows of its ranks are gathered before the experts, and
    the results, of which each has a part, reduce-scattered after them.

    With a capacity all ranks must give the same, and splits are even. Without one the counts are
    sent first and read by the host: once a call, while the slots are sorted and copied; in a
    recomputed region they are remembered.

    What is sent stands in docs/traffic.md; arguments as for ``ExpertParallelDispatcher``.
    """

    def finish_combine(self, pieces: Sequence[Pending]) -> Tensor:
        """Sum of what its experts made of each token [T H], from all pieces, in order."""
        if not isinstance(pieces[0], _Returning):
            return super().finish_combine(pieces)
        y_nH = joined([piece.wait() for piece in pieces])
        order, sizes = pieces[0].order, pieces[0].sizes
        order = order._replace(rows=order.rows.narrow(0, 0, y_nH.shape[0]))
        return self._whole(sum_slots(y_nH, order, last=True), sizes)

    def _start(self, own: Own, chunks: int) -> Sequence[Pending]:
        counts = remember(lambda: self._counts(own, chunks))
        order = by_piece(own.indices, self.num_experts, chunks=chunks, capacity=own.capacity)
        taken_NH = take_rows(own.x.detach(), order.rows)
        splits = self._splits(counts, own.capacity, chunks)
        sizes = [sum(split.send) for split in splits]
        x_nH = copy_slots(own.x, order, taken=taken_NH, sizes=sizes)
        w_n = cut(order.take(own.weights), sizes)
        return [
            _Sent(
                start_exchange(x, w, send=split.send, receive=split.receive, group=self.ep),
                counts.received[index],
                split,
                order,
                own.sizes,
                self.etp,
            )
            for index, (x, w, split) in enumerate(zip(x_nH, w_n, splits, strict=True))
        ]

    def _start_back(self, y_NH: Tensor, handle: "_Handle") -> Pending:
        split = handle.split
        y_MH = sum_slots(tied(y_NH, handle.link), handle.received)
        y_MH = reduce_scatter_to(y_MH, dim=0, group=self.etp, sizes=split.rows)
        exchange = start_exchange(y_MH, send=split.receive, receive=split.send, group=self.ep)
        return _Returning(exchange, handle.order, handle.sizes)

    def _counts(self, own: Own, chunks: int) -> Counts:
        sent_cE = count_pieces(own.indices, self.num_experts, chunks=chunks, capacity=own.capacity)
        return Counts(sent_cE, capacity=own.capacity, ep=self.ep, etp=self.etp)

    def _splits(self, counts: Counts, capacity: int | None, chunks: int) -> "list[_Split]":
        p, q, e = self.ep.size, self.etp.size, self.num_experts // self.ep.size
        if capacity is not None:
            return [
                _Split([e * width] * p, [e * width] * p, [p * e * width] * q, None, width)
                for width in widths(capacity, chunks)
            ]
        sent, received = counts.on_host()
        return [
            _uneven(sent[i * p * e :][: p * e], received[i * q * p * e :][: q * p * e], self)
            for i in range(chunks)
        ]


class _Split(NamedTuple):
    """What travels in one piece.

    Attributes:
        send: Rows to each rank of ``ep``.
        receive: Rows from each rank of ``ep``.
        rows: Rows that each rank of ``etp`` receives.
        counts: Rows of each expert here; ``None`` with a capacity.
        width: Places of each expert for each rank; ``None`` without a capacity.
    """

    send: list[int]
    receive: list[int]
    rows: list[int]
    counts: list[int] | None
    width: int | None


def _uneven(sent_E: list[int], received_qpe: list[int], of: AllToAllDispatcher) -> _Split:
    p, q, e = of.ep.size, of.etp.size, of.num_experts // of.ep.size
    runs = [sum(received_qpe[i * e :][:e]) for i in range(q * p)]
    return _Split(
        [sum(sent_E[i * e :][:e]) for i in range(p)],
        runs[of.etp.rank * p :][:p],
        [sum(runs[i * p :][:p]) for i in range(q)],
        [sum(received_qpe[i::e]) for i in range(e)],
        None,
    )


class _Handle(NamedTuple):
    """What brings one piece's results back.

    Attributes:
        split: What travelled.
        received: Order of the rows received.
        link: Stands for the tokens and weights received.
        order: Of the slots of all pieces on their own rank.
        sizes: ``Own.sizes``.
    """

    split: _Split
    received: Order
    link: Tensor
    order: Order
    sizes: list[int] | None


class _Sent(NamedTuple):
    """A piece on its way to the experts."""

    exchange: Exchange
    counts_qpe: Tensor
    split: _Split
    order: Order
    sizes: list[int] | None
    etp: Group

    def wait(self) -> tuple[Dispatched, _Handle]:
        """Tokens of the experts here, and the handle of this piece."""
        split, num_ranks = self.split, self.counts_qpe.shape[0] * self.counts_qpe.shape[1]
        received = regroup(self.counts_qpe, sum(split.rows), capacity=split.width)
        x_MH, w_M = (
            all_gather_to(rows, dim=0, group=self.etp, sizes=split.rows)
            for rows in self.exchange.wait()
        )
        dispatched = Dispatched(
            x_MH,
            received.rows,
            received.take(w_M),
            received.counts,
            host_counts=split.counts,
            capacity=None if split.width is None else num_ranks * split.width,
            places=received.places,
        )
        link = link_to(x_MH, w_M)
        return dispatched, _Handle(split, received, link, self.order, self.sizes)


class _Returning(NamedTuple):
    """A piece's results on their way back; with ``_Handle.order`` and ``sizes``."""

    exchange: Exchange
    order: Order
    sizes: list[int] | None

    def wait(self) -> Tensor:
        """The results, in the places of the piece [n H]."""
        return self.exchange.wait()[0]
