"""What of a cut tensor this rank counts in sums over the whole, as marks tell it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megablocks_core.groups.cuts import ShardSpec
from megablocks_core.groups.gradient_shards import ShardedGradient, gradient_shard
from megablocks_core.groups.group import Group
from megablocks_core.groups.marking import marks
from megablocks_core.groups.placements import is_dtensor, local, placement_specs


class Share(NamedTuple):
    """One rank's part of a tensor.

    Attributes:
        groups: The groups that cut it; their ranks together hold every element.
        counted: Dimension to the places along it that no earlier rank holds too, where there
            are others.
    """

    groups: tuple[Group, ...]
    counted: dict[int, Tensor]

    @property
    def num_cuts(self) -> int:
        """Number of ranks that hold the whole together."""
        product = 1
        for group in self.groups:
            product *= group.size
        return product

    def of(self, tensor: Tensor) -> Tensor:
        """The part of ``tensor``, cut alike, that counts on this rank."""
        tensor = local(tensor)
        for dim, places in self.counted.items():
            tensor = tensor.index_select(dim, places.to(tensor.device))
        return tensor

    def of_range(self, tensor: Tensor, start: int, shape: Sequence[int]) -> Tensor:
        """The part that counts of a range of the flattened tensor of local ``shape``."""
        if not self.counted:
            return tensor
        counts = torch.ones(tuple(shape), dtype=torch.bool)
        for dim, places in self.counted.items():
            along = torch.zeros(shape[dim], dtype=torch.bool)
            along[places] = True
            counts &= along.view(-1, *[1] * (len(shape) - dim - 1))
        return tensor[counts.view(-1)[start : start + len(tensor)].to(tensor.device)]


def share_of(parameter: Tensor, specs: Sequence[ShardSpec]) -> Share:
    """This rank's share of ``parameter``, by its marks and, if it is a DTensor, its placements."""
    cuts = (*specs, *placement_specs(parameter))
    groups = dict.fromkeys(spec.group for spec in cuts if spec.group.size > 1)
    dims = sorted({spec.dim for spec in specs if spec.has_copies})
    return Share(
        tuple(groups), {dim: _counted(local(parameter).shape[dim], dim, cuts) for dim in dims}
    )


class GradientPart(NamedTuple):
    """What this rank holds of one parameter's gradient.

    Attributes:
        held: The memory, ``None`` where there is no gradient.
        counted: Those of its elements that no earlier rank holds too.
        groups: The groups whose ranks together hold every element.
        device: Of the parameter.
    """

    held: Tensor | None
    counted: Tensor | None
    groups: tuple[Group, ...]
    device: torch.device


def gradient_parts(
    module_or_parameters: nn.Module | Tensor | Iterable[Tensor],
) -> list[GradientPart]:
    """The gradients of all parameters that are trained, each once, wherever they lie.

    Args:
        module_or_parameters: A module, whose marks say how its parameters are cut; or
            parameters, taken as whole.

    Raises:
        ValueError: A parameter has both a gradient and a gradient shard.
    """
    if isinstance(module_or_parameters, nn.Module):
        found = [(parameter, specs) for _, parameter, specs in marks(module_or_parameters)]
    elif isinstance(module_or_parameters, Tensor):
        found = [(module_or_parameters, ())]
    else:
        found = [(parameter, ()) for parameter in dict.fromkeys(module_or_parameters)]
    return [
        gradient_part(parameter, specs) for parameter, specs in found if parameter.requires_grad
    ]


def gradient_part(
    parameter: Tensor, specs: Sequence[ShardSpec], share: Share | None = None
) -> GradientPart:
    """The gradient of one parameter, or the shard of it that hangs there.

    Args:
        parameter: Its ``grad`` may be a sum that is still to be formed (a DTensor's ``Partial``);
            it is formed here.
        specs: The marks.
        share: Of the parameter, if it is known already.
    """
    share = share_of(parameter, specs) if share is None else share
    shard, device = gradient_shard(parameter), local(parameter).device
    if shard is None:
        held = _gradient(parameter)
        counted = None if held is None else share.of(held)
        return GradientPart(held, counted, share.groups, device)
    if not isinstance(parameter.grad, ShardedGradient):
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} must have its gradient in one place: "
            "it has .grad and a gradient shard"
        )
    counted = share.of_range(shard.tensor, shard.start, parameter.shape)
    groups = (*share.groups, *([shard.group] if shard.group.size > 1 else []))
    return GradientPart(shard.tensor, counted, tuple(dict.fromkeys(groups)), device)


def _gradient(parameter: Tensor) -> Tensor | None:
    gradient = parameter.grad
    if gradient is not None and is_dtensor(gradient):
        if any(placement.is_partial() for placement in gradient.placements):
            assert is_dtensor(parameter)
            gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        return gradient.to_local()
    return gradient


def _counted(length: int, dim: int, specs: Sequence[ShardSpec]) -> Tensor:
    """Which places of this rank's ``length`` along ``dim`` no earlier rank holds too."""
    along = [spec for spec in specs if spec.dim == dim]
    for spec in reversed(along):
        length = spec.whole_length(length)
    counts = torch.ones(length, dtype=torch.bool)
    for spec in along:
        held = torch.cat([counts[part] for part in spec.ranges(len(counts))])
        first = torch.zeros_like(held)
        for part in spec.counted(len(counts)):
            first[part] = True
        counts = held & first
    return counts.nonzero().flatten()
