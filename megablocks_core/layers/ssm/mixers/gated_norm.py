"""RMS norm with a gate, over groups of features that may span ranks.

Mamba-2, https://arxiv.org/abs/2405.21060, section 7.1 (the gate first); gated delta networks,
https://arxiv.org/abs/2412.06464 (the norm first).

Dimensions: T tokens, I features, G groups of them. A lowercase letter is this rank's share of the
capital one.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from megablocks_core.groups import LOCAL, Group, ShardSpec, copy_to, mark, reduce_from, split_evenly
from megablocks_core.layers.ssm.mixers.gated_norm_function import Form, gated_norm


def gated(y: Tensor, z: Tensor) -> Tensor:
    """``y * silu(z)``, float32 at least inside."""
    kind = torch.promote_types(y.dtype, torch.float32)
    return (y.to(kind) * silu(z.to(kind))).to(y.dtype)


class GatedRMSNorm(nn.Module):
    """``norm(y * silu(z)) * weight``, or ``norm(y) * weight * silu(z)``, group by group.

    Maps ``y`` and ``z`` [... i] to [... i], at least float32 inside; ``norm(x)`` is
    ``x / sqrt(mean(x^2) + eps)`` over the features of a group. Groups are those of the whole, so
    the result does not depend on the number of ranks. Sends nothing where every group lies on
    one rank; else forward all-reduces T G sums of squares, and backward the same.

    Args:
        features: I.
        groups: G, which divides I.
        eps: Added under the root.
        norm_before_gate: The gate comes last.
        tp: The tensor-parallel ranks, over which the features are cut.
        device: Of the parameter.
        dtype: Of the parameter.

    Raises:
        ValueError: ``groups`` does not divide ``features``, or ``features`` not evenly over ``tp``.
    """

    def __init__(
        self,
        features: int,
        *,
        groups: int = 1,
        eps: float = 1e-5,
        norm_before_gate: bool = False,
        tp: Group = LOCAL,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if groups < 1 or features % groups:
            raise ValueError(f"groups={groups} must divide features={features}")
        own = split_evenly(features, group=tp, name="features")
        self.group_size, self.groups = features // groups, groups
        self.eps, self.norm_before_gate, self.tp = eps, norm_before_gate, tp
        self.form = Form(self.group_size, eps, norm_before_gate)
        self.first, stop = own.start // self.group_size, -(-own.stop // self.group_size)
        # How many of this rank's features lie in each of the groups that it has a part of.
        self.lengths = [
            min(own.stop, (group + 1) * self.group_size) - max(own.start, group * self.group_size)
            for group in range(self.first, stop)
        ]
        self.weight = nn.Parameter(torch.empty(sum(self.lengths), device=device, dtype=dtype))
        mark(self, "weight", ShardSpec(0, tp))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None, prefix: str = "") -> None:
        """Set the weight to one, whatever the seed."""
        self.weight.fill_(1)

    def forward(self, y_Ti: Tensor, z_Ti: Tensor) -> Tensor:
        """The gated norm of ``y`` [... i] with the gate ``z`` [... i]."""
        return self.with_weight(y_Ti, z_Ti, self.weight)

    def with_weight(self, y_Ti: Tensor, z_Ti: Tensor, weight_i: Tensor) -> Tensor:
        """The same with another weight: one that came through ``copy_to``."""
        if self.groups % self.tp.size == 0:
            return gated_norm(y_Ti, z_Ti, weight_i, self.form)
        kind = torch.promote_types(y_Ti.dtype, torch.float32)
        y, gate = y_Ti.to(kind), silu(z_Ti.to(kind))
        if self.norm_before_gate:
            return (self._norm(y) * weight_i * gate).to(y_Ti.dtype)
        return (self._norm(y * gate) * weight_i).to(y_Ti.dtype)

    def extra_repr(self) -> str:
        """Sizes and the order."""
        return (
            f"{self.group_size * self.groups}, groups={self.groups}, eps={self.eps}, "
            f"norm_before_gate={self.norm_before_gate}"
        )

    def _norm(self, x_Ti: Tensor) -> Tensor:
        """The norm over groups that span ranks."""
        squares = [part.square().sum(-1) for part in x_Ti.split(self.lengths, dim=-1)]
        after = self.groups - self.first - len(squares)
        sums_TG = pad(torch.stack(squares, dim=-1), (self.first, after))
        totals_TG = copy_to(reduce_from(sums_TG, group=self.tp), group=self.tp)
        scales = torch.rsqrt(totals_TG / self.group_size + self.eps)
        scales = scales.narrow(-1, self.first, len(squares)).split(1, dim=-1)
        parts = [
            scale.expand(*scale.shape[:-1], length)
            for scale, length in zip(scales, self.lengths, strict=True)
        ]
        return x_Ti * torch.cat(parts, dim=-1)
