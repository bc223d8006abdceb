"""At most so many tokens an expert (GShard, https://arxiv.org/abs/2006.16668, section 2.2).

Dimensions: T tokens of this rank, k slots a token, E experts, C places an expert.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megablocks_core.layers.moe.counting import queue_places
from megablocks_core.layers.moe.routing import NOWHERE, Routing
from megablocks_core.parallel import remember
from megablocks_core.parallel.checks import check_whole

Drop = Literal["weight", "position"]


@dataclass(frozen=True)
class Capacity:
    """How many tokens an expert takes, and which it drops; an argument of routers.

    Attributes:
        factor: 1 holds all choices if they are even: C is ``capacity_of`` of the tokens that count,
            so that pads change nothing. Places are made for as many as all tokens of the call
            could fill.
        drop: As for ``limit``.
        pad: As for ``limit``.

    Raises:
        ValueError: ``factor`` is not above 0, or ``drop`` is no such name.
    """

    factor: float
    drop: Drop = "weight"
    pad: bool = True

    def __post_init__(self) -> None:
        _check_factor(self.factor)
        _check_drop(self.drop)

    def limit(self, routing: Routing) -> Routing:
        """The routing, limited to a capacity of the tokens that count."""
        tokens, top_k = routing.indices.shape
        sizes = {"top_k": top_k, "num_experts": routing.num_experts, "factor": self.factor}
        places = capacity_of(tokens, **sizes)
        allowed = None if routing.mask is None else counted_capacity(routing.num_tokens, **sizes)
        return _limited(routing, places, allowed, drop=self.drop, pad=self.pad)


def check_capacity(capacity: Capacity | None) -> Capacity | None:
    """What is given; raise if it is neither."""
    if capacity is not None and not isinstance(capacity, Capacity):
        raise ValueError(f"capacity={capacity!r} must be a Capacity, such as Capacity(1.25)")
    return capacity


def capacity_of(num_tokens: int, *, top_k: int, num_experts: int, factor: float) -> int:
    """``ceil(factor T k / E)``, and at most T, since a token chooses an expert once.

    Raises:
        ValueError: ``factor`` is not above 0.
    """
    _check_factor(factor)
    return min(num_tokens, math.ceil(num_tokens * top_k / num_experts * factor))


def counted_capacity(num_tokens: Tensor, *, top_k: int, num_experts: int, factor: float) -> Tensor:
    """``capacity_of`` a number of the device."""
    even = num_tokens.double() * top_k / num_experts * factor
    return torch.minimum(num_tokens, even.ceil().long())


def limit(routing: Routing, *, capacity: int, drop: Drop = "weight", pad: bool = True) -> Routing:
    """The routing without what is beyond ``capacity`` tokens an expert. Nothing is sent.

    A dropped slot has no expert and weight 0; the token's other weights stay as they are, so they
    no longer add up to what they did. ``tokens_per_expert``, scores and logits stay too. What is
    dropped is decided once: a recomputed region drops the same.

    Args:
        routing: Of any router.
        capacity: C, counted over the tokens of this routing alone.
        drop: "weight" keeps the highest weights, and of equal ones the earlier token; "position"
            keeps the earlier tokens.
        pad: Every expert gets C places, filled or not, so that shapes do not depend on choices;
            else as many as it has tokens.

    Raises:
        ValueError: ``capacity`` is below 0, or ``drop`` is no such name.
    """
    _check_drop(drop)
    check_whole("capacity", capacity, least=0)
    return _limited(routing, capacity, None, drop=drop, pad=pad)


def _limited(
    routing: Routing, capacity: int, allowed: Tensor | None, *, drop: Drop, pad: bool
) -> Routing:
    """The routing with ``capacity`` places an expert, of which ``allowed`` may be filled."""
    by = routing.weights if drop == "weight" else None
    most = capacity if allowed is None else allowed
    dropped = remember(lambda: queue_places(routing.indices, routing.num_experts, by=by) >= most)
    return routing._replace(
        indices=routing.indices.masked_fill(dropped, NOWHERE),
        weights=routing.weights.masked_fill(dropped, 0),
        capacity=capacity if pad else None,
    )


def _check_factor(factor: float) -> None:
    if not 0 < factor < math.inf:
        raise ValueError(f"factor={factor} must be above 0 and finite")


def _check_drop(drop: str) -> None:
    if drop not in ("weight", "position"):
        raise ValueError(f'drop={drop!r} must be "weight" or "position"')
