"""At most so many tokens an expert (GShard, https://arxiv.org/abs/2006.16668, section 2.2).

Dimensions: T tokens of this rank, k slots a token, E experts, C places an expert.
"""

import math
from dataclasses import dataclass
from typing import Literal

from megablocks_core.layers.moe.counting import queue_places
from megablocks_core.layers.moe.routing import NOWHERE, Routing
from megablocks_core.parallel import remember

Drop = Literal["weight", "position"]


@dataclass(frozen=True)
class Capacity:
    """How many tokens an expert takes, and which it drops; an argument of routers.

    Attributes:
        factor: 1 holds all choices if they are even: C is ``capacity_of`` of the call's tokens.
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
        """The routing, limited."""
        tokens, top_k = routing.indices.shape
        places = capacity_of(
            tokens, top_k=top_k, num_experts=routing.num_experts, factor=self.factor
        )
        return limit(routing, capacity=places, drop=self.drop, pad=self.pad)


def capacity_of(num_tokens: int, *, top_k: int, num_experts: int, factor: float) -> int:
    """``ceil(factor T k / E)``, and at most T, since a token chooses an expert once.

    Raises:
        ValueError: ``factor`` is not above 0.
    """
    _check_factor(factor)
    return min(num_tokens, math.ceil(num_tokens * top_k / num_experts * factor))


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
    if capacity < 0:
        raise ValueError(f"capacity={capacity} must not be negative")
    by = routing.weights if drop == "weight" else None
    dropped = remember(
        lambda: queue_places(routing.indices, routing.num_experts, by=by) >= capacity
    )
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
