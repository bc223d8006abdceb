"""What a dispatcher gives to experts, and what every dispatcher does.

Dimensions: T tokens of this rank, H features, k slots a token, E experts in all, e experts
here, M rows here, N places of all experts here.
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from torch import Tensor

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
        places: The places that read each row of ``x`` [M, any number], -1 where there is none;
            experts find them otherwise.
    """

    x: Tensor
    rows: Tensor
    weights: Tensor
    tokens_per_expert: Tensor
    host_counts: list[int] | None = None
    capacity: int | None = None
    places: Tensor | None = None


class Dispatcher(ABC):
    """Brings tokens to their experts and the results back. It holds nothing between calls."""

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
