"""Clip gradients by the norm of the whole model's gradient, however it is cut."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from megablocks_core.groups import LOCAL, Group, check_group
from megablocks_core.groups.shares import gradient_parts
from megablocks_core.parallel.checks import check_number, check_parameters
from megablocks_core.parallel.gradients.cut_totals import total_over_cuts

# A block of float64 that fits a CPU's cache.
_BLOCK = 1 << 16


@torch.no_grad()
def clip_grad_norm_(
    module_or_parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    *,
    norm_type: float = 2.0,
    pp: Group = LOCAL,
) -> Tensor:
    """Scale gradients in place so that their norm is at most ``max_norm``; return the norm.

    The norm is that of one process: a replicated or tied parameter counts once, and so does a
    slice that neighbours hold too. Gradients may be whole, DTensors on any meshes, or the ranges
    that a sharded optimizer keeps. The norm is a float64 scalar, because powers are summed in
    float64 (a float32 norm of 60 million values is wrong by half a percent). Without any
    gradient it is 0. The factor is torch's: ``max_norm / (norm + 1e-6)``, at most 1.

    Sends one all-reduce of a few numbers over each group that cuts any parameter, and one
    over ``pp``; every rank of them must call it.

    Args:
        module_or_parameters: A module, whose marks say how its parameters are cut; or
            parameters, taken as whole unless they are DTensors or have gradient shards.
        max_norm: The largest norm, at least 0; infinite to measure only.
        norm_type: The order, above 0; may be infinite.
        pp: The pipeline stages, each of which holds its own parameters.

    Raises:
        ValueError: An argument is none of these.
    """
    check_group(pp, "pp")
    check_number("max_norm", max_norm, "at least 0", lambda x: x >= 0)
    check_number("norm_type", norm_type, "above 0", lambda x: x > 0)
    given = check_parameters(module_or_parameters)
    powers: list[tuple[tuple[Group, ...], Tensor | None]] = []
    gradients, device = [], torch.device("cpu")
    for part in gradient_parts(given):
        device, power = part.device, None
        if part.held is not None and part.counted is not None and part.held.numel():
            gradients.append(part.held)
            power = _power(part.counted, norm_type)
        powers.append((part.groups, power))
    zero = torch.zeros((), dtype=torch.float64, device=device)
    power = total_over_cuts(powers, zero, pp, op="max" if norm_type == torch.inf else "sum")
    norm = power if norm_type == torch.inf else power ** (1 / norm_type)
    if gradients:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]
    return norm


def _power(gradient: Tensor, norm_type: float) -> Tensor:
    """Sum of the absolute values' powers in float64, or their maximum if ``norm_type`` is inf."""
    if not gradient.numel():
        return torch.zeros((), dtype=torch.float64, device=gradient.device)
    # On CPU torch makes a float64 copy of all that it sums in float64.
    block = _BLOCK if gradient.device.type == "cpu" else gradient.numel()
    norms = [
        torch.linalg.vector_norm(part, norm_type, dtype=torch.float64)
        for part in gradient.reshape(-1).split(block)
    ]
    stacked = torch.stack(norms)
    return stacked.max() if norm_type == torch.inf else stacked.pow(norm_type).sum()
