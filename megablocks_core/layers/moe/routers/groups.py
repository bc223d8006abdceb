"""Choices limited to a few groups of experts.

DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.2.2. Where a group is
the experts of one node, a token's messages reach few nodes.

Dimensions: T tokens, E experts, G groups.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megablocks_core.layers.moe.routers.scores import highest
from megablocks_core.parallel.checks import check_whole


@dataclass(frozen=True)
class GroupLimit:
    """A token's experts lie in its best ``top_k_groups`` of ``num_groups`` equal groups.

    Attributes:
        num_groups: G; group g holds experts g E / G and on.
        top_k_groups: How many groups a token may choose from.
        best: A group's score is the sum of its so many highest scores: 1 in DeepSeek-V2, 2 in
            DeepSeek-V3, top_k / top_k_groups in Megatron-LM.

    Raises:
        ValueError: ``top_k_groups`` is above ``num_groups``, or one of them is below 1.
    """

    num_groups: int
    top_k_groups: int
    best: int = 1

    def __post_init__(self) -> None:
        for name in ("num_groups", "top_k_groups", "best"):
            check_whole(name, getattr(self, name), least=1)
        if self.top_k_groups > self.num_groups:
            raise ValueError(
                f"top_k_groups={self.top_k_groups} must be at most num_groups={self.num_groups}"
            )

    def check(self, num_experts: int, top_k: int) -> None:
        """Raise unless ``num_experts`` fall into the groups and leave ``top_k`` to choose."""
        if num_experts % self.num_groups:
            raise ValueError(f"num_groups={self.num_groups} must divide num_experts={num_experts}")
        inside = num_experts // self.num_groups
        if self.best > inside:
            raise ValueError(f"best={self.best} must be at most {inside}, the experts of a group")
        if top_k > inside * self.top_k_groups:
            raise ValueError(
                f"top_k={top_k} must be at most {inside * self.top_k_groups}, the experts of "
                f"{self.top_k_groups} groups"
            )

    def limit(self, scores_TE: Tensor) -> Tensor:
        """The scores, minus infinity outside of each token's groups [T E]."""
        by_group = scores_TE.unflatten(-1, (self.num_groups, -1))
        best = by_group.topk(self.best, dim=-1).values.sum(dim=-1)
        chosen = highest(best, self.top_k_groups)
        allowed = torch.zeros_like(best, dtype=torch.bool).scatter(-1, chosen, True)
        return by_group.masked_fill(~allowed[..., None], float("-inf")).flatten(-2)
