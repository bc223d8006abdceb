"""The cuts that a DTensor's placements make, said as marks are."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

from megablocks_core.groups.cuts import Segment, ShardSpec, chunk_slice
from megablocks_core.groups.group import Group

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Loads nothing: DTensor's module takes a second to load, and without it there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of ``tensor``."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def placement_specs(tensor: Tensor) -> tuple[ShardSpec, ...]:
    """The cuts over more than one rank that placements make, outermost first.

    They lie inside those of the marks. None for a plain tensor. A strided shard cuts each of
    as many segments as it has strides; the segments follow the rule of ``torch.chunk``.

    Raises:
        ValueError: This rank is not in the mesh, or a placement is a sum that is not formed yet.
    """
    if not is_dtensor(tensor):
        return ()
    mesh, specs, shape = tensor.device_mesh, [], list(tensor.shape)
    if mesh.get_coordinate() is None:
        raise ValueError(f"device_mesh={mesh} must have this rank")
    for axis, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise ValueError(f"placements={tensor.placements} must be shards and replicas")
        if placement.is_replicate() or mesh.size(axis) == 1:
            continue
        dim = placement.dim % len(shape)  # pyright: ignore[reportAttributeAccessIssue]
        parts = getattr(placement, "split_factor", 1)
        strides = (chunk_slice(shape[dim], parts, index) for index in range(parts))
        segments = tuple(Segment(part.stop - part.start) for part in strides)
        specs.append(ShardSpec(dim, Group.of(mesh.get_group(axis)), segments))
        shape[dim] = specs[-1].held_length(shape[dim])
    return tuple(specs)
