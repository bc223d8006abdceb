"""What of a cut tensor this rank counts in statistics of the whole, as marks tell it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch
from torch import Tensor

from megablocks_core.groups import Group, ShardSpec

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


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


def share_of(parameter: Tensor, specs: Sequence[ShardSpec]) -> Share:
    """This rank's share of ``parameter``, by its marks and, if it is a DTensor, its placements."""
    groups = [spec.group for spec in specs if spec.group.size > 1]
    if is_dtensor(parameter):
        for axis, placement in enumerate(parameter.placements):
            if placement.is_shard():
                groups.append(Group.of(parameter.device_mesh.get_group(axis)))
    counted = {
        dim: _counted(parameter, dim, specs) for dim in {s.dim for s in specs if s.has_copies}
    }
    return Share(tuple(dict.fromkeys(groups)), counted)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of ``tensor``."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Loads nothing: DTensor's module takes a second to load, and without it there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _counted(parameter: Tensor, dim: int, specs: Sequence[ShardSpec]) -> Tensor:
    along = [spec for spec in specs if spec.dim == dim]
    length = parameter.shape[dim]
    for spec in reversed(along):
        length = spec.whole_length(length)
    counts = torch.ones(length, dtype=torch.bool)
    for spec in along:
        held = torch.cat([counts[part] for part in spec.ranges(len(counts))])
        first = torch.zeros_like(held)
        for part in spec.counted(len(counts)):
            first[part] = True
        counts = held & first
    if is_dtensor(parameter):
        for axis, placement in enumerate(parameter.placements):
            if placement.is_shard(dim):
                rank = parameter.device_mesh.get_local_rank(axis)
                parts = counts.chunk(parameter.device_mesh.size(axis))
                counts = parts[rank] if rank < len(parts) else counts[:0]
    return counts.nonzero().flatten()
