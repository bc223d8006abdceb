"""The process groups that one mesh has made, kept by ranks; the views of the mesh share them."""

from __future__ import annotations

import zlib
from copy import deepcopy
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from megablocks_core.groups.agreement import agree
from megablocks_core.groups.group import LOCAL, Group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_WAIT = timedelta(seconds=60)  # for the other ranks to ask for the same groups
_DENSE_AXIS_OF = {"etp": "tp", "ep": "dp", "edp": "dp"}

# The axis whose options a group has, or "", and its ranks.
_Key = tuple[str, tuple[int, ...]]


class ProcessGroups:
    """Makes the groups of a family when first asked for them, and finds them again.

    Attributes:
        by_call: This rank's groups by the calls that asked for them, for people to read.
        own: The groups of this rank that were made here, and so end with ``close``.
    """

    def __init__(
        self,
        mesh: str,
        world_size: int,
        rank: int | None,
        timeout: timedelta | None,
        options: dict[str, Any],
    ) -> None:
        self.mesh = mesh
        self.world_size = world_size
        self.timeout = timeout
        self.options = options
        self.by_call: dict[str, Group] = {}
        self.own: list[Group] = []
        self._rank = rank
        self._world: ProcessGroup | None = None
        # Every group of a family, None where this rank is no member: all ranks know alike
        # what exists, and so what a call has to make.
        self._made: dict[_Key, Group | None] = {}

    @property
    def rank(self) -> int:
        """The rank given, else that of torch.distributed."""
        if self._rank is None:
            self._enter_world()
            import torch.distributed as dist

            return dist.get_rank()
        return self._rank

    def get(self, family: list[list[int]], axes: tuple[str, ...], call: str) -> Group:
        """This rank's group of ``family``, made by all ranks together if it is new."""
        if len(family[0]) == 1:
            return LOCAL
        self._enter_world()
        axis = self._axis_with_options(axes)
        keys = [(axis, tuple(ranks)) for ranks in family]
        new = [key for key in keys if key not in self._made]
        if new:
            self._made |= self._make(new, call)
        group = next(group for key in keys if (group := self._made[key]))
        self.by_call[call] = group
        return group

    def adopt(self, family: list[list[int]], group: Group) -> None:
        """Use ``group``, made elsewhere for all of ``family``, whatever the options."""
        self._enter_world()
        for ranks in map(tuple, family):
            for axis in ("", *self.options):
                self._made[axis, ranks] = group if group.ranks == ranks else None

    def communicators(self) -> int:
        """Number of process groups that this rank uses."""
        return len({group for group in self._made.values() if group})

    def close(self) -> None:
        """Destroy what was made here and forget the rest."""
        import torch.distributed as dist

        for group in self.own:
            if self._world is dist.group.WORLD:  # else they went with their world
                dist.destroy_process_group(group.pg)
            group.unbind()
        self.own.clear()
        self.by_call.clear()
        self._made.clear()

    def _make(self, keys: list[_Key], call: str) -> dict[_Key, Group | None]:
        import torch.distributed as dist

        axis, first_ranks = keys[0]
        if dist.get_backend() != "fake":  # there, the other ranks are not
            request = f"{self.mesh}.{call} making {_listed([ranks for _, ranks in keys])}"
            agree(request, timeout=self.timeout or _WAIT)
        if len(first_ranks) == self.world_size and not axis and self.timeout is None:
            assert dist.group.WORLD is not None
            return {keys[0]: Group.of(dist.group.WORLD)}
        made: dict[_Key, Group | None] = dict.fromkeys(keys)
        for key in keys:
            process_group = dist.new_group(
                list(key[1]),
                timeout=self.timeout,
                pg_options=deepcopy(self.options.get(axis)),  # torch writes the group into it
                group_desc=call,
            )
            if isinstance(process_group, dist.ProcessGroup):  # this rank is a member
                made[key] = group = Group.of(process_group)
                self.own.append(group)
        return made

    def _axis_with_options(self, axes: tuple[str, ...]) -> str:
        """Return the first of ``axes``, fastest first, that has options, as these name it."""
        for axis in axes:
            for name in (axis, _DENSE_AXIS_OF.get(axis, axis)):
                if name in self.options:
                    return name
        return ""

    def _enter_world(self) -> None:
        """Check that the world is the mesh's, and forget groups of an earlier world."""
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                f"{self.mesh} needs torch.distributed initialised for groups of more than one "
                "rank, and for its own rank unless rank= is given"
            )
        here = dist.get_world_size(), dist.get_rank()
        if (self.world_size, here[1] if self._rank is None else self._rank) != here:
            raise ValueError(
                f"world_size={self.world_size} and rank={self._rank} must be those of "
                f"torch.distributed, {here[0]} and {here[1]}, to make groups"
            )
        if self._world is not dist.group.WORLD:
            self.close()
            self._world = dist.group.WORLD


def _listed(groups: list[tuple[int, ...]]) -> str:
    text = str([list(ranks) for ranks in groups])
    if len(text) <= 400:
        return text
    return f"{text[:400]}... ({len(groups)} groups, crc32 {zlib.crc32(text.encode()):08x})"
