"""Which experts each token goes to, and with what weight.

Dimensions: T tokens of this rank, k slots a token, E experts.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# In a slot: no expert. The token is padding, was dropped, or was not chosen.
NOWHERE = -1


class Routing(NamedTuple):
    """What a router decides. The sum of two is the routing of both micro-batches' tokens.

    Attributes:
        indices: Expert of each slot [T k], ``NOWHERE`` where there is none.
        weights: Weight of each slot [T k], at least float32; 0 where there is no expert.
        scores: What the balance loss averages [T E]: non-negative, each row adds up to 1, and
            0 throughout for a token that ``mask`` leaves out.
        logits: What the router computed [T E], at least float32.
        tokens_per_expert: How many tokens chose each expert [E], int64, before any were dropped.
        mask: Whether each token counts [T]; ``None``: all do.
        capacity: At most how many of these tokens an expert takes; ``None``: any number.
    """

    indices: Tensor
    weights: Tensor
    scores: Tensor
    logits: Tensor
    tokens_per_expert: Tensor
    mask: Tensor | None = None
    capacity: int | None = None

    @property
    def num_experts(self) -> int:
        """E."""
        return self.scores.shape[-1]

    @property
    def num_tokens(self) -> Tensor:
        """How many tokens count, as a tensor without dimensions."""
        if self.mask is None:
            return self.scores.new_tensor(self.scores.shape[0], dtype=torch.int64)
        return self.mask.sum()

    def __add__(self, other: "Routing") -> "Routing":  # pyright: ignore
        """The routing of the tokens of both, of this one first.

        Raises:
            ValueError: They are of different numbers of experts or slots.
        """
        for name in ("indices", "scores"):
            own, its = (getattr(one, name).shape[-1] for one in (self, other))
            if own != its:
                raise ValueError(f"{name} of [T {own}] and [T {its}] must be of one width to add")
        indices, weights, scores, logits = (
            torch.cat([getattr(one, name) for one in (self, other)])
            for name in ("indices", "weights", "scores", "logits")
        )
        mask = None
        if self.mask is not None or other.mask is not None:
            mask = torch.cat([_mask(self), _mask(other)])
        counts = self.tokens_per_expert + other.tokens_per_expert
        capacity = None
        if self.capacity is not None and other.capacity is not None:
            capacity = self.capacity + other.capacity
        return Routing(indices, weights, scores, logits, counts, mask, capacity)


def _mask(routing: Routing) -> Tensor:
    return (
        torch.ones_like(routing.scores[:, 0], dtype=torch.bool)
        if routing.mask is None
        else routing.mask
    )
