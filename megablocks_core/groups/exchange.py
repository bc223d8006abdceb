"""An all-to-all that is started now and waited for later, in forward and in backward.

``wait`` is the adjoint of the start and the start that of ``wait``: backward sends the gradients
back where it comes to ``wait``, and waits for them where it comes to the start. What a caller
computes in between is computed while messages travel, both ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megablocks_core.groups.collectives import all_to_all, check_splits
from megablocks_core.groups.group import Group
from megablocks_core.groups.messages import start_all_to_all, wait


def start_exchange(
    *tensors: Tensor, send: Sequence[int], receive: Sequence[int], group: Group
) -> Exchange:
    """Start to send the rows of each tensor to every rank; ``wait`` gives those received.

    One message a tensor. All travel both ways together: a tensor whose result is not used in the
    loss sends zeros back. Every rank must reach ``wait`` in backward, or none. Any number may be
    under way, on all ranks in one order. In compiled code nothing is started early.

    Args:
        *tensors: Rows for rank 0, then for rank 1, and so on [sum(send) ...].
        send: How many rows go to each rank; may be 0.
        receive: How many rows come from each rank; may be 0.
        group: The ranks.

    Raises:
        ValueError: ``send`` or ``receive`` has not one number a rank, or ``send`` does not add up
            to the rows of a tensor.
    """
    for x in tensors:
        check_splits(x, send, receive, group)
    if group.size == 1 or torch.compiler.is_compiling():
        options = {"send": send, "receive": receive, "group": group}
        return Exchange(None, [all_to_all(x, **options) for x in tensors])
    flight = _Flight(list(send), list(receive), group)
    return Exchange(flight, [_Start.apply(flight, *tensors)])


class Exchange:
    """Rows under way between ranks. It holds what is sent until ``wait``."""

    def __init__(self, flight: _Flight | None, tensors: Sequence[Tensor]) -> None:
        self._flight, self._tensors = flight, tuple(tensors)

    def wait(self) -> tuple[Tensor, ...]:
        """The received rows of each tensor, in rank order [sum(receive) ...]."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._tensors = _Finish.apply(flight, *self._tensors)
        return self._tensors


class _Flight:
    """What the start and the end of a message share: its results, and what it reads meanwhile."""

    __slots__ = ("arriving", "group", "held", "receive", "send")

    def __init__(self, send: list[int], receive: list[int], group: Group) -> None:
        self.send, self.receive, self.group = send, receive, group
        self.arriving: list[Tensor] = []
        self.held: Sequence[Tensor] = ()

    def start(self, tensors: Sequence[Tensor], send: list[int], receive: list[int]) -> None:
        self.held = [x.contiguous() for x in tensors]
        self.arriving = [
            start_all_to_all(x, receive=receive, send=send, group=self.group) for x in self.held
        ]

    def finish(self) -> tuple[Tensor, ...]:
        arrived = tuple(wait(x) for x in self.arriving)
        self.arriving, self.held = [], ()
        return arrived


class _Start(torch.autograd.Function):
    """Gives an empty tensor, through which backward comes here after ``_Finish``."""

    @staticmethod
    def forward(ctx: Any, flight: _Flight, *tensors: Tensor) -> Tensor:
        ctx.flight = flight
        flight.start(tensors, flight.send, flight.receive)
        return tensors[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
        return None, *ctx.flight.finish()


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: _Flight, link: Tensor) -> tuple[Tensor, ...]:
        ctx.flight = flight
        return flight.finish()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        flight: _Flight = ctx.flight
        flight.start(grads, flight.receive, flight.send)
        return None, grads[0].new_empty(0)
