"""Dispatch by DeepEP's kernels (https://github.com/deepseek-ai/DeepEP) over NVLink and RDMA.

Checked against ``deep_ep/buffer.py`` of commit dcfd9548: ``Buffer(group, num_nvl_bytes,
num_rdma_bytes)``, ``get_dispatch_layout``, ``dispatch`` and ``combine``.

Dimensions: t tokens of this rank, H features, k slots a token, M tokens received, N places of the
experts here, E experts in all.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megablocks_core.groups import LOCAL, Group
from megablocks_core.layers.moe.dispatch.assignment import Order, by_expert, sum_slots
from megablocks_core.layers.moe.dispatch.dispatcher import Arrived, Dispatched, Pending
from megablocks_core.layers.moe.dispatch.expert_parallel import (
    ExpertParallelDispatcher,
    Own,
    Tokens,
    dropped,
)
from megablocks_core.layers.moe.dispatch.joining import link_to, tied


class DeepEPDispatcher(ExpertParallelDispatcher):
    """Sends a token once to each rank that has one of its experts, on NVIDIA GPUs.

    A rank adds up what its experts made of a token, and these sums are added over ranks: where
    a token's experts lie on several, the last bits depend on ``ep``. The host waits for the
    number of tokens inside DeepEP, in a recomputed region again. What is over a capacity is left
    out and the rest is packed. Nothing is sent in pieces.

    Args:
        hidden_size: H.
        num_experts: E; each rank of ``ep`` holds E / ep.size that follow one another.
        ep: The ranks that share the experts; ``etp`` is not served.
        tp: The tensor-parallel ranks of the dense layers.
        tokens: As for ``ExpertParallelDispatcher``.

    Raises:
        ImportError: The package ``deep_ep`` is absent and there are several ranks.
        ValueError: ``num_experts`` does not divide evenly over ``ep``, or ``tokens`` is neither. In
            a call: the tokens are not bfloat16.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_experts: int,
        ep: Group,
        tp: Group = LOCAL,
        tokens: Tokens = "sharded",
    ) -> None:
        super().__init__(num_experts=num_experts, ep=ep, tp=tp, tokens=tokens)
        self.buffer = _buffer(hidden_size, ep) if ep.size > 1 else None

    def _start(self, own: Own, chunks: int) -> Sequence[Pending]:
        if own.x.dtype != torch.bfloat16:
            raise ValueError(f"x of {own.x.dtype} must be bfloat16, which DeepEP sends")
        indices = own.indices
        if own.capacity is not None:
            indices = dropped(indices, self.num_experts, own.capacity)
        trip = _Trip(self.buffer, self.num_experts)
        x_MH, weights_Mk = _There.apply(own.x, own.weights.float(), indices, trip)
        first_empty = sum(trip.counts)
        order = by_expert(trip.indices, self.num_experts // self.ep.size)
        order = order._replace(slots=order.slots[:first_empty], rows=order.rows[:first_empty])
        dispatched = Dispatched(
            x_MH,
            order.rows,
            order.take(weights_Mk),
            order.counts,
            host_counts=trip.counts,
            places=order.places,
        )
        return [Arrived((dispatched, _Handle(order, trip, link_to(x_MH, weights_Mk), own.sizes)))]

    def _start_back(self, y_NH: Tensor, handle: "_Handle") -> Pending:
        y_MH = sum_slots(tied(y_NH, handle.link), handle.order)
        return Arrived(self._whole(_Back.apply(y_MH, handle.trip), handle.sizes))


class _Trip:
    """One dispatch of a buffer: its layout, and what it says of the tokens received."""

    def __init__(self, buffer: Any, num_experts: int) -> None:
        self.buffer, self.num_experts = buffer, num_experts
        self.layout: Any = None
        self.indices: Any = None
        self.counts: list[int] = []


class _Handle(NamedTuple):
    """What brings the results back; ``sizes`` are ``Own.sizes``."""

    order: Order
    trip: _Trip
    link: Tensor
    sizes: list[int] | None


class _There(torch.autograd.Function):
    """Tokens to their ranks; gradients come back by a combine."""

    @staticmethod
    def forward(
        ctx: Any, x_tH: Tensor, weights_tk: Tensor, indices_tk: Tensor, trip: _Trip
    ) -> tuple[Tensor, Tensor]:
        ctx.trip = trip
        per_rank, per_node, per_expert, in_rank, _ = trip.buffer.get_dispatch_layout(
            indices_tk, trip.num_experts
        )
        x_MH, trip.indices, weights_Mk, trip.counts, trip.layout, _ = trip.buffer.dispatch(
            x_tH.contiguous(),
            topk_idx=indices_tk.contiguous(),
            topk_weights=weights_tk.contiguous(),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        return x_MH, weights_Mk

    @staticmethod
    def backward(ctx: Any, dx_MH: Tensor, dweights_Mk: Tensor) -> tuple[Any, ...]:
        trip: _Trip = ctx.trip
        dx, dweights, _ = trip.buffer.combine(
            dx_MH.contiguous(), trip.layout, topk_weights=dweights_Mk.float().contiguous()
        )
        return dx, dweights, None, None


class _Back(torch.autograd.Function):
    """Results to the ranks of their tokens, added up; gradients follow the tokens' way."""

    @staticmethod
    def forward(ctx: Any, y_MH: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        return trip.buffer.combine(y_MH.contiguous(), trip.layout)[0]

    @staticmethod
    def backward(ctx: Any, dy_tH: Tensor) -> tuple[Any, ...]:
        trip: _Trip = ctx.trip
        return trip.buffer.dispatch(dy_tH.contiguous(), handle=trip.layout)[0], None


def _buffer(hidden_size: int, ep: Group) -> Any:
    """A buffer as large as DeepEP's own settings for so many ranks ask for."""
    try:
        buffer = import_module("deep_ep").Buffer
    except ImportError as error:
        raise ImportError("DeepEPDispatcher needs the package deep_ep (DeepEP)") from error
    row = hidden_size * 2
    configs = [buffer.get_dispatch_config(ep.size), buffer.get_combine_config(ep.size)]
    nvlink = max(config.get_nvl_buffer_size_hint(row, ep.size) for config in configs)
    rdma = max(config.get_rdma_buffer_size_hint(row, ep.size) for config in configs)
    return buffer(ep.pg, nvlink, rdma)
