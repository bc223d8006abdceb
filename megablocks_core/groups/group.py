"""A group of ranks that communicate, and ``LOCAL``, the group of one.

Every part takes a group and nothing else: it never asks torch.distributed who is there.
A group of one sends nothing and needs no initialisation, so the same code runs in one
process. Loading this module loads no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup


class Group:
    """Ranks that communicate, in order.

    Copies of a module share its groups (``deepcopy`` returns the group itself). A pickled
    group carries its ranks only; read back it raises when used, until ``bind`` is called.

    Attributes:
        ranks: The global ranks, in the group's order.
        rank: This process's place in ``ranks``.
    """

    __slots__ = ("__weakref__", "_pg", "rank", "ranks")

    def __init__(
        self, ranks: tuple[int, ...] = (0,), *, rank: int = 0, pg: ProcessGroup | None = None
    ) -> None:
        self.ranks = ranks
        self.rank = rank
        self._pg = pg

    @classmethod
    def of(cls, process_group: ProcessGroup | None) -> Group:
        """Wrap a process group of torch.distributed; one of a single rank becomes ``LOCAL``.

        Raises:
            ValueError: It is none, such as ``dist.group.WORLD`` before the world is initialised.
        """
        import torch.distributed as dist

        if process_group is None:
            raise ValueError(
                "process_group=None must be a process group: call init_process_group first"
            )
        if not isinstance(process_group, dist.ProcessGroup):
            raise ValueError(f"process_group={process_group!r} must be one of torch.distributed")
        ranks = tuple(dist.get_process_group_ranks(process_group))
        if len(ranks) == 1:
            return LOCAL
        return cls(ranks, rank=process_group.rank(), pg=process_group)

    @classmethod
    def named(cls, name: str) -> Group:
        """The group whose ``name`` it is: compiled operations take text, and no groups."""
        if not name:
            return LOCAL
        from torch._C._distributed_c10d import _resolve_process_group
        from torch.distributed.distributed_c10d import GroupName

        return cls.of(_resolve_process_group(GroupName(name)))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def pg(self) -> ProcessGroup | None:
        """The process group of torch.distributed, or ``None`` over a group of one.

        Raises:
            RuntimeError: The group was unpickled or its mesh closed, and not bound again.
        """
        if self._pg is None and self.size > 1:
            raise RuntimeError(
                f"group of ranks {list(self.ranks)} has no process group: it was unpickled or its "
                "mesh was closed; call bind(module, mesh.group(...)) first"
            )
        return self._pg

    @property
    def name(self) -> str:
        """The name under which torch's functional collectives know the process group."""
        pg = self.pg
        return "" if pg is None else pg.group_name

    def bind(self, group: Group) -> None:
        """Take over the process group of ``group``, which must have the same ranks.

        Raises:
            ValueError: The ranks differ.
        """
        if group.ranks != self.ranks:
            raise ValueError(
                f"group of ranks {list(group.ranks)} must have the ranks {list(self.ranks)} "
                "of the group it is bound to"
            )
        self.rank, self._pg = group.rank, group._pg

    def unbind(self) -> None:
        """Forget the process group, because it was destroyed; a use from now on raises."""
        self._pg = None

    # Sums, gathers and words between ranks, outside autograd. None changes its argument.

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce ``tensor`` over the group by ``op`` ("sum", "max" or "min"), on every rank."""
        if self.size == 1:
            return tensor.clone()
        import torch

        result = torch.ops._c10d_functional.all_reduce(tensor.contiguous(), op, self.name)
        return torch.ops._c10d_functional.wait_tensor(result)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's ``tensor``, in rank order; lengths of dim 0 may differ and be 0."""
        from megablocks_core.groups.messages import all_gather_lists

        return all_gather_lists(tensor, group=self)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """``tensor`` of the group's rank ``source``, on every rank."""
        if self.size == 1:
            return tensor.clone()
        import torch

        result = torch.ops._c10d_functional.broadcast(tensor.contiguous(), source, self.name)
        return torch.ops._c10d_functional.wait_tensor(result)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's picklable ``value``, in rank order."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.pg)
        return values

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """The picklable ``value`` of the group's rank ``source``, on every rank."""
        if self.size == 1:
            return value
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, src=self.ranks[source], group=self.pg)
        return box[0]

    def barrier(self) -> None:
        """Return once every rank has called it."""
        if self.size > 1:
            import torch.distributed as dist

            dist.barrier(group=self.pg)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Group) and (self.ranks, self._pg) == (other.ranks, other._pg)

    def __hash__(self) -> int:
        return hash(self.ranks)

    def __copy__(self) -> Group:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (_unpickled, (self.ranks, self.rank))

    def __repr__(self) -> str:
        return "LOCAL" if self is LOCAL else f"Group(ranks={list(self.ranks)}, rank={self.rank})"


LOCAL = Group()


def check_group(group: object, name: str = "group") -> None:
    """Raise unless it is a ``Group``: an axis's name or ``None`` in its place is a usual slip.

    Raises:
        ValueError: It is none; ``name`` is what the caller calls it.
    """
    if not isinstance(group, Group):
        raise ValueError(f'{name}={group!r} must be a Group: LOCAL, or such as mesh.group("tp")')


def bind(module: nn.Module, *groups: Group) -> None:
    """Bind every unpickled group that ``module`` or its marks hold to the one of equal ranks.

    Raises:
        ValueError: A group that the module holds has the ranks of none in ``groups``.
    """
    for group in groups:
        check_group(group)
    by_ranks = {group.ranks: group for group in groups}
    for held in _groups_of(module):
        if held.size == 1 or held._pg is not None:
            continue
        if held.ranks not in by_ranks:
            raise ValueError(
                f"groups={[list(ranks) for ranks in by_ranks]} must include the ranks "
                f"{list(held.ranks)} of a group that the module holds"
            )
        held.bind(by_ranks[held.ranks])


def _groups_of(module: nn.Module) -> Iterator[Group]:
    from megablocks_core.groups.marking import marks

    for part in module.modules():
        yield from (value for value in vars(part).values() if isinstance(value, Group))
    for _, _, specs in marks(module):
        yield from (spec.group for spec in specs)


def _unpickled(ranks: tuple[int, ...], rank: int) -> Group:
    return LOCAL if len(ranks) == 1 else Group(ranks, rank=rank)
