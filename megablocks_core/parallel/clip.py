"""Clip gradients by the norm of the whole model's gradient, however it is cut."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from megablocks_core.groups import LOCAL, Group, ShardSpec, check_group, marks

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

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
    slice that neighbours hold too. It is a float64 scalar, because powers are summed in
    float64 (a float32 norm of 60 million values is wrong by half a percent). Without any
    gradient it is 0. The factor is torch's: ``max_norm / (norm + 1e-6)``, at most 1.

    Sends one all-reduce of a few numbers over each group that cuts any parameter, and one
    over ``pp``; every rank of them must call it.

    Args:
        module_or_parameters: A module, whose marks say how its parameters are cut; or
            parameters, taken as whole.
        max_norm: The largest norm.
        norm_type: The order, above 0; may be infinite.
        pp: The pipeline stages, each of which holds its own parameters.

    Raises:
        ValueError: ``norm_type`` is not above 0.
    """
    check_group(pp, "pp")
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type} must be above 0")
    cut = _with_cuts(module_or_parameters)
    powers: dict[tuple[Group, ...], list[Tensor]] = {}
    gradients = []
    for parameter, specs in cut:
        found = powers.setdefault(_groups_that_cut(parameter, specs), [])
        if parameter.grad is not None and _local(parameter.grad).numel():
            gradients.append(_local(parameter.grad))
            found.append(_power(_counted(gradients[-1], parameter, specs), norm_type))
    device = cut[0][0].device if cut else torch.device("cpu")
    power = _total(powers, pp, op="max" if norm_type == torch.inf else "sum", device=device)
    norm = power if norm_type == torch.inf else power ** (1 / norm_type)
    if gradients:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]
    return norm


def _with_cuts(
    module_or_parameters: nn.Module | Tensor | Iterable[Tensor],
) -> list[tuple[Tensor, tuple[ShardSpec, ...]]]:
    """The parameters that are trained, each once, with their cuts."""
    if isinstance(module_or_parameters, nn.Module):
        cut = [(parameter, specs) for _, parameter, specs in marks(module_or_parameters)]
    elif isinstance(module_or_parameters, Tensor):
        cut = [(module_or_parameters, ())]
    else:
        cut = [(parameter, ()) for parameter in dict.fromkeys(module_or_parameters)]
    return [(parameter, specs) for parameter, specs in cut if parameter.requires_grad]


def _groups_that_cut(parameter: Tensor, specs: Sequence[ShardSpec]) -> tuple[Group, ...]:
    """The groups of more than one rank over which a parameter is cut, an FSDP cut last."""
    groups = [spec.group for spec in specs]
    if _is_dtensor(parameter):
        mesh = parameter.device_mesh
        for axis, placement in enumerate(parameter.placements):
            if placement.is_shard():
                groups.append(Group.of(mesh.get_group(axis)))
    return tuple(dict.fromkeys(group for group in groups if group.size > 1))


def _is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Loads nothing: DTensor's module takes a second to load, and without it there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if _is_dtensor(tensor) else tensor


def _counted(gradient: Tensor, parameter: Tensor, specs: Sequence[ShardSpec]) -> Tensor:
    """A local gradient with zeros where an earlier rank holds the same slice."""
    for dim in {spec.dim for spec in specs if spec.has_copies}:
        counts = _counts_along(dim, parameter.shape[dim], specs)
        counts = counts.to(gradient.device).view(-1, *[1] * (parameter.dim() - dim - 1))
        if _is_dtensor(parameter):
            from torch.distributed.tensor import distribute_tensor

            whole = counts.expand(parameter.shape).contiguous()
            mesh, placements = parameter.device_mesh, parameter.placements
            counts = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
        gradient = torch.where(counts, gradient, 0.0)
    return gradient


def _counts_along(dim: int, length: int, specs: Sequence[ShardSpec]) -> Tensor:
    """Which places of this rank's share of ``dim`` no earlier rank holds too."""
    along = [spec for spec in specs if spec.dim == dim]
    for spec in reversed(along):
        length = spec.whole_length(length)
    counts = torch.ones(length, dtype=torch.bool)
    for spec in along:
        held = torch.cat([counts[part] for part in spec.ranges(length)])
        first = torch.zeros_like(held)
        for part in spec.counted(length):
            first[part] = True
        counts = held & first
        length = len(counts)
    return counts


def _power(gradient: Tensor, norm_type: float) -> Tensor:
    """Sum of the absolute values' powers in float64, or their maximum if ``norm_type`` is inf."""
    # On CPU torch makes a float64 copy of all that it sums in float64.
    block = _BLOCK if gradient.device.type == "cpu" else gradient.numel()
    norms = [
        torch.linalg.vector_norm(part, norm_type, dtype=torch.float64)
        for part in gradient.reshape(-1).split(block)
    ]
    stacked = torch.stack(norms)
    return stacked.max() if norm_type == torch.inf else stacked.pow(norm_type).sum()


def _total(
    powers: dict[tuple[Group, ...], list[Tensor]], pp: Group, *, op: str, device: torch.device
) -> Tensor:
    """The power of the whole model: each part is combined over the groups that cut it."""
    zero = torch.zeros((), dtype=torch.float64, device=device)
    totals = {groups: _combined([zero, *found], op) for groups, found in powers.items()}
    for group in dict.fromkeys(group for groups in powers for group in groups):
        cut = [groups for groups in totals if group in groups]
        heard = _heard(torch.stack([totals[groups] for groups in cut]), op, group)
        totals.update(zip(cut, heard, strict=True))
    return _heard(_combined([zero, *totals.values()], op).view(1), op, pp)[0]


def _heard(powers: Tensor, op: str, group: Group) -> Tensor:
    """Powers combined over a group; NaN on one rank is NaN on all, also in a maximum."""
    if op == "sum":
        return group.all_reduce(powers, op)
    top, unknown = group.all_reduce(
        torch.stack(
            [powers.nan_to_num(nan=0.0, posinf=torch.inf), powers.isnan().to(powers.dtype)]
        ),
        op,
    )
    return torch.where(unknown > 0, torch.nan, top)


def _combined(powers: list[Tensor], op: str) -> Tensor:
    stacked = torch.stack(powers)
    return stacked.max() if op == "max" else stacked.sum()
