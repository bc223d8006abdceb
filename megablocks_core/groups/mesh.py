"""Name the axes of a world and make the groups over them.

A mesh factors the ranks of a world into axes: tp (tensor), cp (context), dp (data) and pp
(pipeline), and the same ranks again, for experts, into etp, ep, edp and pp. The arithmetic
works for any world in one process; groups are made when they are asked for, at set-up.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from megablocks_core.groups.group import Group
from megablocks_core.groups.layout import (
    DENSE_AXES,
    EXPERT_AXES,
    Layout,
    check_same_stages,
    dense_layout,
    described,
    expert_layout,
    read_as_dense,
    split_family,
)
from megablocks_core.groups.process_groups import ProcessGroups

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class _Axes:
    """Named axes over the ranks of a mesh; base of the dense and the expert view."""

    __slots__ = ("_layout", "_process_groups", "_view")

    def __init__(self, layout: Layout, view: str, process_groups: ProcessGroups) -> None:
        self._layout = layout
        self._view = view
        self._process_groups = process_groups

    def size(self, axis: str) -> int:
        """Number of ranks along ``axis``."""
        return self._layout.size(axis)

    def coordinate(self, axis: str) -> int:
        """Place of this rank along ``axis``."""
        return self._layout.coordinate(axis, self._process_groups.rank)

    def ranks(self, *axes: str) -> list[list[int]]:
        """Every group over ``axes`` together, as ascending lists of ranks."""
        return self._layout.family(*axes)

    def group(self, *axes: str) -> Group:
        """This rank's group over ``axes`` together; over axes of size 1 it is ``LOCAL``.

        The first call for these ranks makes the process groups of the whole family, and every
        rank of the world must make it; from then on it only looks up.

        Raises:
            ValueError: An axis that the mesh lacks, or a mesh that is not of this world.
            RuntimeError: torch.distributed is not initialised, or other ranks asked for other
                groups, or for none in time; then every rank raises.
        """
        axes = self._layout.fastest_first(*axes)
        call = f"{self._view}group({', '.join(map(repr, axes))})"
        return self._process_groups.get(self._layout.family(*axes), axes, call)

    def split(self, *axes: str, inner: int) -> tuple[Group, Group]:
        """Split the group over ``axes`` for hybrid sharding, as (shard, replicate).

        ``shard`` is ``inner`` neighbours along the axes; ``replicate`` is the ranks that have
        the same place in their blocks of ``inner``.

        Raises:
            ValueError: ``inner`` does not divide the size of the axes together.
        """
        axes = self._layout.fastest_first(*axes)
        families = split_family(self._layout.family(*axes), inner=inner, name=" * ".join(axes))
        call = f"{self._view}split({', '.join(map(repr, axes))}, inner={inner})"
        shard, replicate = (
            self._process_groups.get(family, axes, f"{call}[{index}]")
            for index, family in enumerate(families)
        )
        return shard, replicate

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self


class ExpertAxes(_Axes):
    """The ranks of a mesh as etp, ep, edp and pp: ``mesh.expert``."""

    __slots__ = ()


class Mesh(_Axes):
    """The axes of a world: how many ranks each has, who is where, and the groups over them.

    Ranks are numbered by their coordinates, the first axis of ``order`` fastest. A group over
    several axes is one group, its ranks ascending. The expert view has the same ranks as
    etp x ep x edp = tp x cp x dp, with ``order`` read with tp as etp, dp as ep-edp and cp left
    out; ``etp`` does not follow ``tp``.

    A mesh never changes, sets up nothing when it is made, and shares nothing with other
    meshes. Making groups sends a few messages through the store of torch.distributed.

    Args:
        world_size: Number of ranks; the default is that of torch.distributed, or 1 where it is
            not initialised. With it, a mesh of any size is arithmetic that needs no torch.
        rank: This process's rank, given with ``world_size``; else that in torch.distributed.
        tp: Tensor-parallel ranks.
        cp: Context-parallel ranks.
        dp: Data-parallel ranks; -1 is the rest of the world.
        pp: Pipeline stages.
        ep: Expert-parallel ranks.
        etp: Tensor-parallel ranks of each expert.
        order: The four dense axes, fastest first.
        timeout: How long ranks wait for each other, making groups and in their collectives.
            The default is 60 s while they agree on what to make, then that of torch.
        options: Back-end options by axis (``{"tp": ProcessGroupNCCL.Options(...)}``), copied for
            each group. A group over several axes takes those of its fastest axis that has some;
            an expert axis without its own takes those of the dense axis it is read from.

    Raises:
        ValueError: The sizes do not make up the world, or one is not a positive number.
    """

    __slots__ = ("_arguments", "_expert_layout")

    def __init__(
        self,
        *,
        world_size: int | None = None,
        rank: int | None = None,
        tp: int = 1,
        cp: int = 1,
        dp: int = -1,
        pp: int = 1,
        ep: int = 1,
        etp: int = 1,
        order: str = "tp-cp-dp-pp",
        timeout: timedelta | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        sizes = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
        if world_size is None:
            world_size, rank = _this_world(rank, {**sizes, "ep": ep, "etp": etp})
        layout = dense_layout(world_size, sizes, order)
        expert = expert_layout(layout, ep=ep, etp=etp)
        if rank is not None and rank not in range(world_size):
            raise ValueError(f"rank={rank!r} must be in range(world_size={world_size})")
        if options and not set(options) <= {*DENSE_AXES, *EXPERT_AXES}:
            raise ValueError(f"options={list(options)} must be axes: {DENSE_AXES + EXPERT_AXES}")
        self._expert_layout = expert
        self._arguments = {
            "world_size": world_size,
            **{axis: layout.size(axis) for axis in DENSE_AXES},
            "ep": ep,
            "etp": etp,
            "order": order,
        }
        super().__init__(
            layout, "", ProcessGroups(repr(self), world_size, rank, timeout, dict(options or {}))
        )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._layout.world_size

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._process_groups.rank

    @property
    def expert(self) -> ExpertAxes:
        """The same ranks as etp, ep, edp and pp.

        Raises:
            ValueError: ``order`` would give experts other pp groups than the dense parts.
        """
        check_same_stages(self._layout, self._expert_layout)
        return ExpertAxes(self._expert_layout, "expert.", self._process_groups)

    @classmethod
    def from_device_mesh(
        cls,
        device_mesh: DeviceMesh,
        *,
        ep: int = 1,
        etp: int = 1,
        timeout: timedelta | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Mesh:
        """Read a mesh from torch's, and use the process groups that it has.

        Its dimensions are named tp, cp, dp and pp; a neighbouring pair dp_replicate and
        dp_shard reads as dp, whose ``split`` then gives the two groups. An axis that it lacks
        has size 1.

        Raises:
            ValueError: Other names, or a mesh that is not the whole world in ascending order.
        """
        names = tuple(device_mesh.mesh_dim_names or ())
        dims = Layout(names[::-1], tuple(device_mesh.shape)[::-1])
        sizes, order = read_as_dense(dims)
        mesh = cls(**sizes, ep=ep, etp=etp, order=order, timeout=timeout, options=options)
        if device_mesh.mesh.flatten().tolist() != list(range(mesh.world_size)):
            raise ValueError(f"device_mesh={device_mesh} must hold every rank, ascending")
        for dim, size in zip(dims.axes, dims.sizes, strict=True):
            if size > 1:
                group = Group.of(device_mesh.get_group(dim))
                mesh._process_groups.adopt(dims.family(dim), group)
        return mesh

    def to_device_mesh(self, device_type: str | None = None) -> DeviceMesh:
        """Torch's mesh over the axes larger than 1, the slowest first, with the same groups.

        ``device_type`` is that of the default back end unless given. Makes the groups that do
        not exist yet, so every rank must call it.

        Raises:
            ValueError: Every axis has size 1, so that there is no process group.
        """
        from torch import arange
        from torch.distributed.device_mesh import DeviceMesh

        axes = [axis for axis in reversed(self._layout.axes) if self.size(axis) > 1]
        if not axes:
            raise ValueError(f"{self} must have an axis larger than 1 to be a device mesh")
        return DeviceMesh.from_group(
            [pg for axis in axes if (pg := self.group(axis).pg)],
            device_type or _device_type(),
            mesh=arange(self.world_size).view([self.size(axis) for axis in axes]),
            mesh_dim_names=tuple(axes),
        )

    def describe(self) -> str:
        """Sizes, this rank's groups by the calls that asked for them, and how many they are."""
        made = self._process_groups
        return "\n".join(
            [
                f"{self.world_size} ranks, fastest axis first",
                f"dense:  {self._layout}",
                f"expert: {self._expert_layout}",
                *(f"{call}: {list(group.ranks)}" for call, group in made.by_call.items()),
                f"{made.communicators()} communicators on this rank, {len(made.own)} made here",
            ]
        )

    def close(self) -> None:
        """Destroy the process groups that this mesh made; every rank must call it.

        Its groups raise when used from then on. Asking again makes new ones.
        """
        self._process_groups.close()

    def __reduce__(self) -> tuple[Any, ...]:
        made = self._process_groups
        return partial(Mesh, **self._arguments, timeout=made.timeout, options=made.options), ()

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{name}={value!r}' for name, value in self._arguments.items())})"


def _this_world(rank: int | None, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Return the size of torch.distributed's world and this rank, or (1, 0) without one."""
    if rank is not None:
        raise ValueError(f"rank={rank} must come with world_size=")
    dist = sys.modules.get("torch.distributed")  # nobody has a world who has not loaded torch
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    if any(isinstance(size, int) and size > 1 for size in sizes.values()):
        given = described(1, sizes)
        raise ValueError(
            f"sizes above 1 need world_size= or torch.distributed initialised; got {given}"
        )
    return 1, 0


def _device_type() -> str:
    """Return the kind of device that the default back end works on."""
    import torch
    import torch.distributed as dist

    accelerator = torch.accelerator.current_accelerator()
    return "cpu" if accelerator is None or dist.get_backend() == "gloo" else accelerator.type
