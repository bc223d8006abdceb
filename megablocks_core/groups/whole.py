"""From slices to whole logical tensors and back, by the marks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megablocks_core.groups.cuts import ShardSpec, Specs, own_slices, whole_shape
from megablocks_core.groups.group import Group
from megablocks_core.groups.marking import clean_name, marks, specs_of, without_ddp
from megablocks_core.groups.stacks import (
    kind_of,
    separate_name,
    separate_names,
    shape_of,
    stacked,
    unstacked,
)


def logical_shape(tensor: Tensor, specs: tuple[ShardSpec, ...]) -> tuple[int, ...]:
    """Shape of the whole tensor of which ``tensor`` is this rank's share."""
    return whole_shape(tuple(tensor.shape), specs)


def logical_tensors(
    module: nn.Module, *, remove_duplicate: bool = False, unstack: bool = False
) -> Iterator[tuple[str, Tensor, Specs]]:
    """Yield (name, tensor, specs) for all that a state dict holds, buffers included.

    A tied tensor comes under each of its names, or under the first alone with
    ``remove_duplicate``. With ``unstack`` a tensor that is marked with ``each`` comes apart
    into views under the separate names, those of which this rank holds a share.
    """
    seen: set[int] = set()
    for name, tensor, specs in _parameters_and_buffers(module):
        if not (remove_duplicate and id(tensor) in seen):
            seen.add(id(tensor))
            if unstack:
                yield from unstacked(name, tensor, specs)
            else:
                yield name, tensor, specs


def whole_tensor(tensor: Tensor, specs: tuple[ShardSpec, ...]) -> Tensor:
    """The whole tensor, on every rank, outside autograd.

    One all-gather for each cut, innermost first; slices that neighbours hold too are taken
    from the first of them.
    """
    whole: Any = tensor.detach()
    if hasattr(whole, "full_tensor"):  # an FSDP cut, which lies inside the others
        whole = whole.full_tensor()
    for spec in reversed(specs):
        if spec.group.size > 1:
            whole = _joined(whole, spec)
    return whole


def gather_whole(module: nn.Module) -> dict[str, Tensor]:
    """Whole tensors by logical name, on every rank: what one process's state dict holds.

    A stack that is marked with ``each`` comes apart into views under the separate names. Every
    rank of every group must call it. It sends each cut tensor once for each cut; tensors
    that are not cut are returned as they are (detached, not copied), and tied names share
    one tensor.

    Raises:
        ValueError: ``module`` is none.
    """
    _check_module(module)
    gathered: dict[int, Tensor] = {}
    whole: dict[str, Tensor] = {}
    for name, tensor, specs in logical_tensors(module):
        if id(tensor) not in gathered:
            gathered[id(tensor)] = whole_tensor(tensor, specs)
        found = gathered[id(tensor)]
        if specs.each is None:
            whole[name] = found
        else:
            whole |= zip(separate_names(name, specs.each, len(found)), found, strict=True)
    return whole


def load_whole(module: nn.Module, tensors: Mapping[str, Any], *, strict: bool = True) -> None:
    """Copy this rank's slices of whole tensors into ``module``; sends nothing.

    Args:
        module: Its parameters and persistent buffers are filled in place.
        tensors: By logical name: tensors, or lazy slices as safetensors gives them (with
            ``get_shape()``, ``get_dtype()`` and indexing), of which only this rank's share is read.
        strict: Every tensor of the module must be given and every given one used. A tied
            parameter may be given under any of its names. A stack that is marked with ``each``
            is given under the separate names, or whole under its own.

    Raises:
        ValueError: ``module`` is none, names are missing or left over, a shape differs, or
            floating-point, complex and whole numbers stand in for each other; nothing was changed.
    """
    _check_module(module)
    wanted = list(logical_tensors(module))
    given = stacked(tensors, wanted)
    if strict:
        _check_names(wanted, given)
    for name, tensor, specs in wanted:
        if name in given:
            shape, rule = shape_of(given[name]), logical_shape(tensor, specs)
            if shape != rule:
                raise ValueError(f"tensors[{name!r}] of shape {shape} must have shape {rule}")
            if kind_of(given[name]) != kind_of(tensor):
                raise ValueError(
                    f"tensors[{name!r}] of {kind_of(given[name])} numbers must have "
                    f"{kind_of(tensor)} ones, as a tensor of {tensor.dtype}"
                )
    filled: set[int] = set()
    for name, tensor, specs in wanted:
        if name in given and id(tensor) not in filled:
            filled.add(id(tensor))
            load_slices(tensor, specs, given[name])


def _check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise ValueError(f"module={module!r} must be a torch.nn.Module")


@torch.no_grad()
def load_slices(tensor: Tensor, specs: tuple[ShardSpec, ...], whole: Any) -> None:
    """Copy this rank's slices of ``whole`` (a tensor or a lazy slice of a file) into ``tensor``."""
    if tensor.dim() == 0:
        tensor.copy_(whole if isinstance(whole, Tensor) else whole[...])
        return
    if hasattr(tensor, "full_tensor"):
        _load_fsdp(tensor, specs, whole)
        return
    for theirs, ours in own_slices(specs, logical_shape(tensor, specs)):
        tensor[ours].copy_(whole[theirs])


def to_dtensor(tensor: Tensor, specs: tuple[ShardSpec, ...], device_mesh: Any) -> Any:
    """A DTensor view of this rank's share, sharing its memory.

    Args:
        tensor: This rank's share.
        specs: Its cuts.
        device_mesh: A DeviceMesh of which each cut's group is one dimension; the tensor is
            replicated along the others.

    Raises:
        ValueError: Placements cannot say the cut: several segments, slices that neighbours
            hold too, one dimension cut twice, or a group that is not a dimension of the mesh.
    """
    from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

    placements: list[Placement] = [Replicate()] * device_mesh.ndim
    shape = logical_shape(tensor, specs)
    axes = [Group.of(device_mesh.get_group(axis)) for axis in range(device_mesh.ndim)]
    for spec in specs:
        if spec.group.size == 1:
            continue
        ranks = [group.ranks for group in axes]
        if len(spec.segments or ()) > 1 or spec.has_copies:
            raise ValueError(f"segments={spec.segments} cannot be said by DTensor placements")
        if spec.group.ranks not in ranks:
            raise ValueError(f"device_mesh must have the ranks {spec.group.ranks} as a dimension")
        if any(isinstance(p, Shard) and p.dim == spec.dim for p in placements):
            raise ValueError(f"dim={spec.dim} is cut twice, which this view cannot say")
        placements[ranks.index(spec.group.ranks)] = Shard(spec.dim)
    size, strides = torch.Size(shape), torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        tensor.detach(), device_mesh, placements, run_check=False, shape=size, stride=strides
    )


def _parameters_and_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor, Specs]]:
    yield from marks(module, remove_duplicate=False)
    for prefix, owner in module.named_modules(remove_duplicate=False):
        path = without_ddp(module, prefix)
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                yield clean_name(f"{path}.{name}" if path else name), buffer, specs_of(owner, name)


def _joined(local: Tensor, spec: ShardSpec) -> Tensor:
    """Undo one cut: gather the ranks' shares and put each range in its place."""
    length = spec.whole_length(local.shape[spec.dim])
    rows = local.movedim(spec.dim, 0)
    whole = rows.new_empty(length, *rows.shape[1:])
    for rank, share in enumerate(spec.group.all_gather(rows.contiguous())):
        start = 0
        for part in spec.ranges(length, rank):
            whole[part] = share[start : start + part.stop - part.start]
            start += part.stop - part.start
    return whole.movedim(0, spec.dim).contiguous()


def _load_fsdp(tensor: Any, specs: tuple[ShardSpec, ...], whole: Any) -> None:
    """Fill a DTensor whose placements cut this rank's tensor-parallel share again."""
    from torch.distributed.tensor import distribute_tensor

    share = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    for theirs, ours in own_slices(specs, whole_shape(tuple(tensor.shape), specs)):
        share[ours].copy_(whole[theirs])
    cut = distribute_tensor(share, tensor.device_mesh, tensor.placements, src_data_rank=None)
    tensor.copy_(cut)


def _check_names(wanted: list[tuple[str, Tensor, Specs]], tensors: Mapping[str, Any]) -> None:
    served = {id(tensor) for name, tensor, _ in wanted if name in tensors}
    missing = [
        separate_name(name, specs.each, "{}") if specs.each else name
        for name, tensor, specs in wanted
        if id(tensor) not in served
    ]
    unused = sorted(set(tensors) - {name for name, _, _ in wanted})
    if missing or unused:
        raise ValueError(
            f"tensors must have the module's names: missing {missing}, not in the module {unused}"
        )
