"""Counts over the whole model's gradient, however it is cut: zeros, and what is not finite."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from megablocks_core.groups import LOCAL, Group, check_group
from megablocks_core.groups.shares import gradient_parts
from megablocks_core.parallel.checks import check_parameters
from megablocks_core.parallel.gradients.cut_totals import total_over_cuts


@torch.no_grad()
def count_zeros(
    module_or_parameters: nn.Module | Tensor | Iterable[Tensor], *, pp: Group = LOCAL
) -> Tensor:
    """Number of gradient elements that are zero, an int64 scalar: that of one process.

    A replicated or tied parameter counts once, and so does a slice that neighbours hold too. A
    parameter without a gradient has no zeros. Nothing waits for the device.

    Sends one all-reduce of a few numbers over each group that cuts any parameter, and one
    over ``pp``; every rank of them must call it.

    Args:
        module_or_parameters: A module, whose marks say how its parameters are cut; or
            parameters, taken as whole unless they are DTensors or have gradient shards.
        pp: The pipeline stages, each of which holds its own parameters.

    Raises:
        ValueError: An argument is none of these.
    """
    check_group(pp, "pp")
    counts: list[tuple[tuple[Group, ...], Tensor | None]] = []
    device = torch.device("cpu")
    for part in gradient_parts(check_parameters(module_or_parameters)):
        device, count = part.device, None
        if part.counted is not None:
            count = part.counted.numel() - torch.count_nonzero(part.counted)
        counts.append((part.groups, count))
    zero = torch.zeros((), dtype=torch.int64, device=device)
    return total_over_cuts(counts, zero, pp, op="sum")


@torch.no_grad()
def all_finite(
    module_or_parameters: nn.Module | Tensor | Iterable[Tensor], *, group: Group = LOCAL
) -> Tensor:
    """Whether no rank has a NaN or an infinity in any gradient: a bool scalar, equal on all.

    Sends one number over ``group``, and one over each group that cuts a parameter and has a
    rank outside ``group``. Nothing waits for the device.

    Args:
        module_or_parameters: A module, whose marks say how its parameters are cut; or
            parameters, taken as whole unless they are DTensors or have gradient shards.
        group: All ranks that step together. ``LOCAL`` serves where gradients were reduced and
            no rank has parameters of its own, such as those of a pipeline's stage.

    Raises:
        ValueError: An argument is none of these.
    """
    check_group(group)
    found: list[tuple[tuple[Group, ...], Tensor | None]] = []
    device, inside = torch.device("cpu"), set(group.ranks) if group.size > 1 else set()
    for part in gradient_parts(check_parameters(module_or_parameters)):
        device, unsound = part.device, None
        if part.held is not None:
            unsound = _unsound(part.held)
        groups = tuple(cut for cut in part.groups if not set(cut.ranks) <= inside)
        found.append((groups, unsound))
    zero = torch.zeros((), dtype=torch.int32, device=device)
    return total_over_cuts(found, zero, group, op="max") == 0


def _unsound(gradient: Tensor) -> Tensor:
    """1 if an element is not finite, else 0; no tensor as large as the gradient is made."""
    if not gradient.numel():
        return torch.zeros((), dtype=torch.int32, device=gradient.device)
    low, high = torch.aminmax(gradient)  # of a NaN both are NaN
    return (~(low.isfinite() & high.isfinite())).to(torch.int32)
