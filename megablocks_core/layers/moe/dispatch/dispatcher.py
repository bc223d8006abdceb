"""What a dispatcher gives to experts, and what every dispatcher does.

Dimensions: T tokens of this rank, H features, k slots a token, E experts in all, e experts
here, M rows here, N places of all experts here.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megablocks_core.groups import LOCAL, Group
from megablocks_core.layers.moe.routing import Routing


class Dispatched(NamedTuple):
    """The tokens of the experts of this rank, not yet copied into expert order.

    Attributes:
        x: Tokens [M H]; over one rank the layer's own input, where a token lies once.
        rows: Which row of ``x`` each expert reads [N], int64, expert after expert; inside an
            expert in the order of the tokens, and -1 where a place is empty: at the end, or with
            a capacity, C places an expert, N = e C, at the end of each.
        weights: The weight of each place [N]; 0 where it is empty.
        tokens_per_expert: How many places each expert here fills [e], int64.
        host_counts: ``tokens_per_expert`` as integers of the host, if a dispatcher has read
            them; experts that need them read them otherwise.
        capacity: C, if there is one.
        places: The places that read each row of ``x`` [M s], -1 for none; so the gradient of
            ``x`` is a sum of gathers. ``None`` where only ``rows`` says it.
    """

    x: Tensor
    rows: Tensor
    weights: Tensor
    tokens_per_expert: Tensor
    host_counts: list[int] | None = None
    capacity: int | None = None
    places: Tensor | None = None


class Pending(Protocol):
    """Something under way; ``wait`` gives it, once."""

    def wait(self) -> Any:
        """What has arrived."""
        ...


class Arrived:
    """Something that is there already."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def wait(self) -> Any:
        """What has arrived."""
        return self._value


class Dispatcher(ABC):
    """Brings tokens to their experts and the results back. It holds nothing between calls.

    ``dispatch`` and ``combine`` are all a caller needs. ``start_dispatch``, ``start_combine`` and
    ``finish_combine`` are the same in steps, between which other work goes on.

    Attributes:
        ep: The ranks that share the experts.
        etp: The ranks that share the features of each expert.
    """

    ep: Group = LOCAL
    etp: Group = LOCAL

    @abstractmethod
    def dispatch(self, x_TH: Tensor, routing: Routing) -> tuple[Dispatched, Any]:
        """Tokens of the experts here, and the handle that ``combine`` takes.

        Args:
            x_TH: This rank's tokens [T H].
            routing: Of these tokens.
        """

    @abstractmethod
    def combine(self, y_NH: Tensor, handle: Any) -> Tensor:
        """Sum of what its experts made of each token, in the order of its slots [T H].

        Args:
            y_NH: The experts' results, weighted, in the order of ``Dispatched.rows``.
            handle: Of the dispatch.
        """

    def agree(  # noqa: B027 (one rank has nothing to compare)
        self, facts: Mapping[str, int], *, device: torch.device
    ) -> None:
        """Raise on all ranks unless these numbers are equal on all; nothing over one rank.

        ``dispatch`` calls it. Who calls ``start_dispatch`` where ranks might differ calls it first.

        Args:
            facts: Name to number.
            device: Of the tokens.
        """

    def start_dispatch(
        self, x_TH: Tensor, routing: Routing, *, chunks: int = 1
    ) -> Sequence[Pending]:
        """Send tokens to their experts in pieces; each gives ``(Dispatched, handle)``.

        Args:
            x_TH: This rank's tokens [T H].
            routing: Of these tokens.
            chunks: How many pieces at most, equal on all ranks. Where sending in pieces gains
                nothing there is one.
        """
        return [Arrived(self.dispatch(x_TH, routing))]

    def start_combine(self, y_NH: Tensor, handle: Any) -> Pending:
        """Send one piece's results back; ``finish_combine`` takes what this returns."""
        return Arrived(self.combine(y_NH, handle))

    def finish_combine(self, pieces: Sequence[Pending]) -> Tensor:
        """Sum of what its experts made of each token [T H], from all pieces, in order."""
        (piece,) = pieces
        return piece.wait()
