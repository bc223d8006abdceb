"""What dispatchers over ranks share: who holds which experts, and whose tokens they are.

Dimensions: T tokens of this rank, t those it sends, H features, k slots a token, E experts in
all, e experts here, C places an expert.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megablocks_core.groups import LOCAL, Group, chunk_slice, gather_from, scatter_to, split_evenly
from megablocks_core.layers.moe.dispatch.agreement import agree, number_of
from megablocks_core.layers.moe.dispatch.assignment import Order, by_expert, sum_slots
from megablocks_core.layers.moe.dispatch.dispatcher import (
    Arrived,
    Dispatched,
    Dispatcher,
    Pending,
)
from megablocks_core.layers.moe.dispatch.joining import link_to, tied, with_graph
from megablocks_core.layers.moe.dispatch.local import LocalDispatcher
from megablocks_core.layers.moe.routing import NOWHERE, Routing
from megablocks_core.parallel import remember

Tokens = Literal["sharded", "replicated"]


class Own(NamedTuple):
    """The tokens that this rank sends.

    Attributes:
        x: Tokens [t H].
        indices: Expert of each slot [t k].
        weights: Weight of each slot [t k].
        capacity: How many of these an expert takes at most, equal on all ranks; or ``None``.
        sizes: t of each rank of ``tp``; ``None`` where the tokens are all of this rank's.
    """

    x: Tensor
    indices: Tensor
    weights: Tensor
    capacity: int | None
    sizes: list[int] | None


class _Alone(NamedTuple):
    """A dispatch without other ranks: its order, what stands for its tokens, ``Own.sizes``."""

    order: Order
    link: Tensor
    sizes: list[int] | None


class ExpertParallelDispatcher(Dispatcher):
    """Base of the dispatchers whose experts lie on the ranks of ``ep``, and ``etp`` in features.

    Args:
        num_experts: E; each rank of ``ep`` holds E / ep.size that follow one another.
        ep: The ranks that share the experts: ``mesh.expert.group("ep")``.
        etp: The ranks that share the features of each: ``mesh.expert.group("etp")``.
        tp: The tensor-parallel ranks of the dense layers, whatever ``etp`` is.
        tokens: Whether each rank of ``tp`` holds tokens of its own ("sharded", as under sequence
            parallelism), or all hold the same ("replicated"): then each sends its slice, so that
            a token goes once, and the results are gathered.

    Raises:
        ValueError: ``num_experts`` does not divide evenly over ``ep``, or ``tokens`` is neither.
    """

    def __init__(
        self,
        *,
        num_experts: int,
        ep: Group,
        etp: Group = LOCAL,
        tp: Group = LOCAL,
        tokens: Tokens = "sharded",
    ) -> None:
        if tokens not in ("sharded", "replicated"):
            raise ValueError(f'tokens={tokens!r} must be "sharded" or "replicated"')
        self.experts = split_evenly(num_experts, group=ep, name="num_experts")
        self.num_experts, self.ep, self.etp, self.tp, self.tokens = num_experts, ep, etp, tp, tokens

    def dispatch(self, x_TH: Tensor, routing: Routing) -> tuple[Dispatched, Any]:
        """Tokens of the experts here, and the handle that ``combine`` takes."""
        facts = {"top_k": routing.indices.shape[-1], "hidden_size": x_TH.shape[-1]}
        self.agree(facts | {"dtype": number_of(x_TH.dtype)}, device=x_TH.device)
        (piece,) = self.start_dispatch(x_TH, routing)
        return piece.wait()

    def agree(self, facts: Mapping[str, int], *, device: torch.device) -> None:
        """Raise on all ranks unless these numbers, and that of experts, are equal on all.

        Sends a message of 16 bytes a number over each group; none in a recomputed region.
        """
        over = [self.etp, self.ep, *([self.tp] if self.tokens == "replicated" else [])]
        groups = {group.ranks: group for group in over if group.size > 1}
        if not groups:
            return
        cast = torch.is_autocast_enabled(device.type)  # then experts' results have that dtype
        autocast = number_of(torch.get_autocast_dtype(device.type)) if cast else -2
        whole = {"num_experts": self.num_experts, "autocast": autocast, **facts}
        remember(lambda: agree(whole, groups=[*groups.values()], device=device))

    def combine(self, y_NH: Tensor, handle: Any) -> Tensor:
        """Sum of what its experts made of each token, in the order of its slots [T H]."""
        return self.finish_combine([self.start_combine(y_NH, handle)])

    def start_dispatch(
        self, x_TH: Tensor, routing: Routing, *, chunks: int = 1
    ) -> Sequence[Pending]:
        """Send tokens to their experts in pieces; each gives ``(Dispatched, handle)``."""
        if chunks < 1:
            raise ValueError(f"chunks={chunks} must be at least 1")
        own = self._own(x_TH, routing)
        if self.ep.size > 1 or self.etp.size > 1:
            return self._start(own, chunks)
        routing = routing._replace(indices=own.indices, weights=own.weights, capacity=own.capacity)
        dispatched, order = LocalDispatcher().dispatch(own.x, routing)
        link = link_to(own.x, own.weights)
        return [Arrived((dispatched, _Alone(order, link, own.sizes)))]

    def start_combine(self, y_NH: Tensor, handle: Any) -> Pending:
        """Send one piece's results back; ``finish_combine`` takes what this returns."""
        if isinstance(handle, _Alone):
            y_tH = sum_slots(tied(y_NH, handle.link), handle.order)
            return Arrived(self._whole(y_tH, handle.sizes))
        return self._start_back(y_NH, handle)

    @abstractmethod
    def _start(self, own: Own, chunks: int) -> Sequence[Pending]:
        """``start_dispatch`` where there are several ranks."""

    @abstractmethod
    def _start_back(self, y_NH: Tensor, handle: Any) -> Pending:
        """``start_combine`` where there are several ranks."""

    def _own(self, x_TH: Tensor, routing: Routing) -> Own:
        self._check(x_TH, routing)
        x, weights = with_graph(x_TH, routing.weights)
        indices, capacity = routing.indices, routing.capacity
        if self.tokens == "sharded" or self.tp.size == 1:
            return Own(x, indices, weights, capacity, None)
        if capacity is not None:
            # Which slots are over capacity is a matter of all tokens, not of a slice.
            indices = dropped(indices, self.num_experts, capacity)
        sizes = [
            part.stop - part.start
            for part in (chunk_slice(len(x), self.tp.size, rank) for rank in range(self.tp.size))
        ]
        if capacity is not None:
            capacity = min(capacity, max(sizes) * indices.shape[1])
        start = sum(sizes[: self.tp.rank])
        indices = indices[start : start + sizes[self.tp.rank]]
        x, weights = (scatter_to(each, dim=0, group=self.tp, sizes=sizes) for each in (x, weights))
        return Own(x, indices, weights, capacity, sizes)

    def _check(self, x_TH: Tensor, routing: Routing) -> None:
        if routing.num_experts != self.num_experts:
            raise ValueError(
                f"routing of {routing.num_experts} experts must have num_experts="
                f"{self.num_experts}, as the dispatcher"
            )
        if len(x_TH) != len(routing.indices):
            raise ValueError(
                f"routing of {len(routing.indices)} tokens must have those of x, {len(x_TH)}"
            )

    def _whole(self, y_tH: Tensor, sizes: Sequence[int] | None) -> Tensor:
        """The results of all tokens of this rank, from those it sent."""
        return y_tH if sizes is None else gather_from(y_tH, dim=0, group=self.tp, sizes=sizes)


def dropped(indices_Tk: Tensor, num_experts: int, capacity: int) -> Tensor:
    """The expert of each slot, ``NOWHERE`` too for those beyond an expert's capacity."""
    places = by_expert(indices_Tk, num_experts, capacity=capacity).places
    return torch.where(places < 0, NOWHERE, indices_Tk)
