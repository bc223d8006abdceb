"""Which ranks form a group: arithmetic over named axes, for a world of any size, no torch.

The ranks of a world are numbered by their coordinates in mixed radix, the fastest axis first:
with ``order="tp-dp"``, tp=2 and dp=3, rank 5 is tp 1, dp 2. A group over some axes is every
rank that differs in those axes alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

DENSE_AXES = ("tp", "cp", "dp", "pp")
EXPERT_AXES = ("etp", "ep", "edp", "pp")


@dataclass(frozen=True)
class Layout:
    """Axes of a world and their sizes, the fastest axis first."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(self.sizes)

    def __str__(self) -> str:
        return ", ".join(f"{axis}={size}" for axis, size in zip(self.axes, self.sizes, strict=True))

    def size(self, axis: str) -> int:
        """Number of ranks along ``axis``."""
        return self.sizes[self._index(axis)]

    def stride(self, axis: str) -> int:
        """Distance between two ranks that are neighbours along ``axis``."""
        return prod(self.sizes[: self._index(axis)])

    def coordinate(self, axis: str, rank: int) -> int:
        """Place of ``rank`` along ``axis``."""
        return rank // self.stride(axis) % self.size(axis)

    def family(self, *axes: str) -> list[list[int]]:
        """Every group over ``axes`` together; groups and their ranks both ascend.

        Raises:
            ValueError: No axis, an axis that the layout lacks, or one named twice.
        """
        self.fastest_first(*axes)
        others = [axis for axis in self.axes if axis not in axes]
        return [[first + step for step in self._steps(axes)] for first in self._steps(others)]

    def fastest_first(self, *axes: str) -> tuple[str, ...]:
        """The same axes, the fastest first, however the caller wrote them.

        Raises:
            ValueError: No axis, an axis that the layout lacks, or one named twice.
        """
        places = {self._index(axis) for axis in axes}
        if not axes or len(places) < len(axes):
            raise ValueError(f"axes={axes} must name one axis or several different ones")
        return tuple(self.axes[place] for place in sorted(places))

    def _steps(self, axes: Sequence[str]) -> list[int]:
        """Ranks reached from rank 0 along ``axes``, ascending."""
        steps = [0]
        for axis, size in zip(self.axes, self.sizes, strict=True):
            if axis in axes:
                stride = self.stride(axis)
                steps = [step + place * stride for place in range(size) for step in steps]
        return steps

    def _index(self, axis: str) -> int:
        if axis not in self.axes:
            raise ValueError(f"axis={axis!r} must be one of {', '.join(self.axes)}")
        return self.axes.index(axis)


def dense_layout(world_size: int, sizes: Mapping[str, int], order: str) -> Layout:
    """Lay out ``sizes`` of tp, cp, dp and pp; ``dp=-1`` takes the rest of the world.

    Raises:
        ValueError: A size is no positive number, the sizes do not make up the world, or
            ``order`` does not name each axis once.
    """
    axes = tuple(order.split("-"))
    if sorted(axes) != sorted(DENSE_AXES):
        raise ValueError(
            f"order={order!r} must name {', '.join(DENSE_AXES)} once each, joined by '-'"
        )
    given = described(world_size, sizes)
    rest_of_world = sizes["dp"] == -1
    known = {axis: size for axis, size in sizes.items() if not (axis == "dp" and rest_of_world)}
    _check_positive({"world_size": world_size, **known}, given)
    if rest_of_world:
        known["dp"] = world_size // prod(known.values())
    if prod(known.values()) != world_size:
        whole = " for a whole dp" if rest_of_world else ""
        raise ValueError(f"world_size must be tp * cp * dp * pp{whole}; got {given}")
    return Layout(axes, tuple(known[axis] for axis in axes))


def expert_layout(dense: Layout, *, ep: int, etp: int) -> Layout:
    """Factor the same ranks as etp x ep x edp, with pp as it is.

    The order is the dense one with tp read as etp, dp as ep-edp, and cp left out.

    Raises:
        ValueError: ``etp * ep`` does not divide tp * cp * dp.
    """
    dense_sizes = {axis: dense.size(axis) for axis in DENSE_AXES}
    given = described(dense.world_size, {**dense_sizes, "ep": ep, "etp": etp})
    _check_positive({"ep": ep, "etp": etp}, given)
    stage = dense.world_size // dense.size("pp")
    if stage % (etp * ep):
        raise ValueError(f"etp * ep = {etp * ep} must divide tp * cp * dp = {stage}; got {given}")
    sizes = {"etp": etp, "ep": ep, "edp": stage // (etp * ep), "pp": dense.size("pp")}
    read_as = {"tp": ("etp",), "dp": ("ep", "edp"), "pp": ("pp",), "cp": ()}
    axes = tuple(axis for dense_axis in dense.axes for axis in read_as[dense_axis])
    return Layout(axes, tuple(sizes[axis] for axis in axes))


def check_same_stages(dense: Layout, expert: Layout) -> None:
    """Refuse an expert layout whose pp groups are not those of the dense one.

    Raises:
        ValueError: Their ranks differ.
    """
    if dense.size("pp") > 1 and dense.stride("pp") != expert.stride("pp"):
        raise ValueError(
            f"order={'-'.join(dense.axes)!r} must give dense and expert layouts the same pp "
            f"groups, as it always does with pp last; got {dense}, ep={expert.size('ep')}, "
            f"etp={expert.size('etp')}"
        )


def read_as_dense(dims: Layout) -> tuple[dict[str, int], str]:
    """Sizes and order of the dense axes that ``dims`` (of torch's mesh, fastest first) names.

    A neighbouring pair dp_shard-dp_replicate reads as dp.

    Raises:
        ValueError: A dimension has another name.
    """
    axes = "-".join(dims.axes).replace("dp_shard-dp_replicate", "dp").split("-")
    if not set(axes) <= set(DENSE_AXES) or len(set(axes)) < len(axes):
        raise ValueError(
            f"mesh_dim_names={dims.axes[::-1]} must be different ones of {', '.join(DENSE_AXES)}, "
            "or dp_replicate and dp_shard side by side for dp"
        )
    sizes: dict[str, int] = dict.fromkeys(DENSE_AXES, 1)
    for dim in dims.axes:
        sizes[dim.split("_")[0]] *= dims.size(dim)
    return sizes, "-".join([*axes, *(axis for axis in DENSE_AXES if axis not in axes)])


def split_family(
    family: list[list[int]], *, inner: int, name: str
) -> tuple[list[list[int]], list[list[int]]]:
    """Cut each group into blocks of ``inner`` neighbours (shard) and across them (replicate).

    Raises:
        ValueError: ``inner`` does not divide the groups' size; ``name`` is what they are over.
    """
    size = len(family[0])
    if not _is_positive(inner) or size % inner:
        raise ValueError(f"inner={inner} must divide {name}={size}")
    shard = [group[at : at + inner] for group in family for at in range(0, size, inner)]
    replicate = [group[at::inner] for group in family for at in range(inner)]
    return shard, replicate


def described(world_size: int, sizes: Mapping[str, int]) -> str:
    """Return "world_size=8, tp=2, ..." for errors: the same text on every rank."""
    return ", ".join(
        f"{name}={size!r}" for name, size in {"world_size": world_size, **sizes}.items()
    )


def _check_positive(sizes: Mapping[str, int], given: str) -> None:
    for name, size in sizes.items():
        if not _is_positive(size):
            rest = " or -1 (the rest of the world)" if name == "dp" else ""
            raise ValueError(f"{name}={size!r} must be a positive whole number{rest}; got {given}")


def _is_positive(size: object) -> bool:
    return isinstance(size, int) and size >= 1
