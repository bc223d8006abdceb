"""Every rank gets all tokens, and works on those of its experts.

Dimensions: t tokens of this rank, A of all ranks, H features, k slots a token, N places of the
experts here, q ranks of an expert's features, p ranks of experts, e experts here.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megablocks_core.groups import all_gather_to, reduce_scatter_to
from megablocks_core.groups.messages import all_gather
from megablocks_core.layers.moe.counting import count_choices
from megablocks_core.layers.moe.dispatch.assignment import (
    Order,
    by_expert,
    sum_slots,
)
from megablocks_core.layers.moe.dispatch.counts import check_equal
from megablocks_core.layers.moe.dispatch.dispatcher import Arrived, Dispatched, Pending
from megablocks_core.layers.moe.dispatch.expert_parallel import (
    ExpertParallelDispatcher,
    Own,
    dropped,
)
from megablocks_core.layers.moe.dispatch.host_read import HostRead
from megablocks_core.layers.moe.dispatch.joining import link_to, tied
from megablocks_core.layers.moe.routing import NOWHERE
from megablocks_core.parallel import remember


class AllGatherDispatcher(ExpertParallelDispatcher):
    """Gathers the tokens of all ranks of ``ep`` and ``etp``, and reduce-scatters the results.

    Tokens stand in the order of the ranks of ``ep``, of ``etp``, and of the rank's own tokens.
    A token's slots are summed in their order on each rank, and these sums over the ranks: where
    its experts lie on several, the last bits depend on ``ep``.

    It sends more than an all-to-all unless a token has about as many experts as there are ranks,
    in few messages. With a capacity all ranks must give the same, and as many tokens. Without
    one the numbers of tokens are sent first and read by the host, once a call; in compiled code
    nothing is read, and ranks must give as many tokens there too. Nothing is gained by sending in
    pieces, so there is one.

    What is sent stands in docs/traffic.md; arguments as for ``ExpertParallelDispatcher``.
    """

    def _start(self, own: Own, chunks: int) -> Sequence[Pending]:
        capacity, (first, last) = own.capacity, (self.experts.start, self.experts.stop)
        indices = own.indices
        if capacity is not None:
            indices = dropped(indices, self.num_experts, capacity)
            capacity *= self.ep.size * self.etp.size
        told = remember(lambda: self._tell(own))
        inner, outer, counts = self._read(told, own)
        x_AH, weights_Ak = (
            all_gather_to(
                all_gather_to(each, dim=0, group=self.etp, sizes=inner),
                dim=0,
                group=self.ep,
                sizes=outer,
            )
            for each in (own.x, own.weights)
        )
        for sizes, group in ((inner, self.etp), (outer, self.ep)):
            if group.size > 1:
                indices = all_gather(indices, dim=0, group=group, sizes=sizes)
        here = (indices >= first) & (indices < last)
        indices = torch.where(here, indices - first, NOWHERE)
        order = by_expert(indices, last - first, capacity=capacity)
        if counts is not None:
            num_places = sum(counts)
            order = order._replace(slots=order.slots[:num_places], rows=order.rows[:num_places])
        dispatched = Dispatched(
            x_AH,
            order.rows,
            order.take(weights_Ak),
            order.counts,
            host_counts=counts,
            capacity=capacity,
            places=order.places,
        )
        handle = _Handle(order, inner, outer, link_to(x_AH, weights_Ak), own.sizes)
        return [Arrived((dispatched, handle))]

    def _start_back(self, y_NH: Tensor, handle: "_Handle") -> Pending:
        y_AH = sum_slots(tied(y_NH, handle.link), handle.order)
        y_AH = reduce_scatter_to(y_AH, dim=0, group=self.ep, sizes=handle.outer)
        y_tH = reduce_scatter_to(y_AH, dim=0, group=self.etp, sizes=handle.inner)
        return Arrived(self._whole(y_tH, handle.sizes))

    def _tell(self, own: Own) -> HostRead | None:
        """Tell all ranks how many tokens are here, the capacity, and the counts of experts."""
        device = own.indices.device
        known = [len(own.x), -1 if own.capacity is None else own.capacity]
        counts = count_choices(own.indices, self.num_experts)
        told = torch.cat([torch.tensor([known], device=device), counts.unsqueeze(0)], 1)
        for size, group in ((1, self.etp), (self.etp.size, self.ep)):
            if group.size > 1:
                told = all_gather(told, dim=0, group=group, sizes=[size] * group.size)
        if own.capacity is not None or torch.compiler.is_compiling():
            check_equal(told[:, 0], "tokens with a capacity or in compiled code")
            check_equal(told[:, 1], "capacity")
            return None
        counts_e = told[:, 2:].sum(0)[self.experts]
        return HostRead(torch.cat([told[:, 0], told[:, 1], counts_e]))

    def _read(
        self, told: HostRead | None, own: Own
    ) -> tuple[list[int], list[int], list[int] | None]:
        """Tokens of each rank of ``etp``, of each of ``ep`` after that; counts of experts here."""
        p, q = self.ep.size, self.etp.size
        if told is None:
            t = len(own.x)
            return [t] * q, [t * q] * p, None
        values = told.values()
        tokens, capacities, counts = values[: p * q], values[p * q : 2 * p * q], values[2 * p * q :]
        if any(capacity != -1 for capacity in capacities):
            raise ValueError("capacity must be None on all ranks, or on none")
        by_rank = [tokens[i * q :][:q] for i in range(p)]
        return by_rank[self.ep.rank], [sum(part) for part in by_rank], counts


class _Handle(NamedTuple):
    """What brings the results back.

    Attributes:
        order: Of the slots of all tokens, among the experts here.
        inner: Tokens of each rank of ``etp``.
        outer: Tokens of each rank of ``ep``, with those of its ``etp``.
        link: Stands for the gathered tokens and weights.
        sizes: ``Own.sizes``.
    """

    order: Order
    inner: list[int]
    outer: list[int]
    link: Tensor
    sizes: list[int] | None
