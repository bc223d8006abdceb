"""RMS norms over all heads at once, cut with the heads (OLMoE, https://arxiv.org/abs/2409.02060).

Dimensions: T tokens, F features of a projection. A lowercase letter is this rank's share of the
capital one.
"""

import torch
from torch import Tensor, nn

from megablocks_core.groups import (
    LOCAL,
    Group,
    Segment,
    ShardSpec,
    copy_slices_to,
    copy_to,
    mark,
    reduce_from,
)


class ProjectionNorm(nn.Module):
    """``y = x / sqrt(mean(x^2) + eps) * weight`` over the features of all ranks together.

    Used through ``normalise``, which sends for several norms at once.

    Args:
        features: F.
        eps: Added under the root.
        segments: How the features are cut, as those of the projection before.
        group: The tensor-parallel ranks.
        device: Of the parameter.
        dtype: Of the parameter.
    """

    def __init__(
        self,
        features: int,
        *,
        eps: float,
        segments: tuple[Segment, ...] | None = None,
        group: Group = LOCAL,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.features, self.eps, self.group = features, eps, group
        self.spec = ShardSpec(0, group, segments)
        own = self.spec.held_length(features)
        self.weight = nn.Parameter(torch.empty(own, device=device, dtype=dtype))
        mark(self, "weight", self.spec)
        # Ranks that hold the same slice count it once.
        self.holders = group.size * own // features
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None, prefix: str = "") -> None:
        """Set the weight to one, whatever the seed."""
        self.weight.fill_(1)

    def extra_repr(self) -> str:
        """Size and eps."""
        return f"{self.features}, eps={self.eps}"


def normalise(*pairs: tuple[ProjectionNorm, Tensor]) -> list[Tensor]:
    """Each tensor [... T f] normalised by its norm, all over one group.

    Over several ranks forward all-reduces a number a token and tensor, in float32 at least, and
    backward the same; weights of which ranks hold the same slice cost one small message more.
    """
    group = pairs[0][0].group
    precise = [x.to(torch.promote_types(x.dtype, torch.float32)) for _, x in pairs]
    squares = torch.stack(
        [x.square().sum(-1) / norm.holders for x, (norm, _) in zip(precise, pairs, strict=True)]
    )
    totals = copy_to(reduce_from(squares, group=group), group=group)
    weights = copy_slices_to(*(norm.weight for norm, _ in pairs), specs=[n.spec for n, _ in pairs])
    results = []
    for (norm, given), x, weight, total in zip(pairs, precise, weights, totals, strict=True):
        scale = torch.rsqrt(total / norm.features + norm.eps).unsqueeze(-1)
        results.append((x * scale * weight).to(given.dtype))
    return results
