"""The logical matrices of a parameter: of packed segments and stacked experts each one.

Everything follows from the marks and from a DTensor's placements, so one process and many ranks
find the same matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from megablocks_core.groups import Group, ShardSpec, Specs, logical_shape
from megablocks_core.groups.cuts import held_ranges
from megablocks_core.groups.placements import placement_specs
from megablocks_core.groups.shares import share_of

Range = tuple[int, int]


@dataclass(frozen=True)
class MatrixLayout:
    """How the matrices of one parameter lie in it and over the ranks.

    A unit is a two-dimensional tensor of this rank: the parameter, or one entry of a stack. Units
    of one parameter are cut alike.

    Attributes:
        shape: Of a unit's whole.
        stacked: Whether dimension 0 of the parameter stacks units.
        cuts: The cuts of a unit over more than one rank, outermost first.
        rows: The ranges of rows that are matrices of their own.
        columns: Likewise of columns.
        counted: For each dimension that neighbours hold too, the places that count here.
    """

    shape: tuple[int, int]
    stacked: bool
    cuts: tuple[ShardSpec, ...]
    rows: tuple[Range, ...]
    columns: tuple[Range, ...]
    counted: dict[int, Tensor]

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups that cut a unit, outermost first."""
        return tuple(dict.fromkeys(spec.group for spec in self.cuts))

    @property
    def cost(self) -> int:
        """Multiplications that a unit costs, in proportion."""
        return sum(
            rows * columns * min(rows, columns)
            for rows in map(_length, self.rows)
            for columns in map(_length, self.columns)
        )

    @property
    def boxes(self) -> list[tuple[Range, Range]]:
        """The matrices of a unit: ranges of rows and of columns of its whole."""
        return [(rows, columns) for rows in self.rows for columns in self.columns]

    @property
    def split_dim(self) -> int | None:
        """The one dimension that is cut, if it is the longer one of every matrix."""
        dims = {spec.dim for spec in self.cuts}
        if len(dims) != 1:
            return None
        (dim,) = dims
        lengths = [(_length(rows), _length(columns)) for rows, columns in self.boxes]
        return dim if all(pair[dim] >= pair[1 - dim] for pair in lengths) else None

    def units(self, tensor: Tensor) -> list[Tensor]:
        """Views of this rank's units in a tensor of the shape of its share."""
        return list(tensor.unbind(0)) if self.stacked else [tensor]

    @cached_property
    def held(self) -> list[list[slice]]:
        """What this rank holds of a unit's whole, along each dimension, in storage order."""
        return held_ranges(self.shape, self.cuts)

    def places(self, dim: int, wanted: Range) -> Tensor:
        """Where in this rank's share of a unit, along ``dim``, the range of the whole lies."""
        found, start = [torch.arange(0)], 0
        for part in self.held[dim]:
            low, high = max(part.start, wanted[0]), min(part.stop, wanted[1])
            if low < high:
                found.append(torch.arange(low, high) + (start - part.start))
            start += part.stop - part.start
        return torch.cat(found)


def matrix_layout(parameter: Tensor, specs: Specs) -> MatrixLayout | None:
    """The matrices of a parameter; ``None`` if it has not two dimensions, or those of a stack.

    A marked cut's segments are matrices of their own; those of a cut inside another are not
    packed parts. Cuts of the stack itself leave every unit whole.
    """
    first = int(specs.each is not None)
    shape = logical_shape(parameter, specs)[first:]
    if len(shape) != 2:
        return None
    cuts = [spec for spec in (*specs, *placement_specs(parameter)) if spec.dim >= first]
    cuts = tuple(replace(spec, dim=spec.dim - first) for spec in cuts if spec.group.size > 1)
    counted = share_of(parameter, specs).counted
    return MatrixLayout(
        (shape[0], shape[1]),
        bool(first),
        cuts,
        _segments(specs, first, shape[0]),
        _segments(specs, first + 1, shape[1]),
        {dim - first: places for dim, places in counted.items() if dim >= first},
    )


def part_of(unit: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The rows and columns of a unit at these places; the unit itself if they are all."""
    if (len(rows), len(columns)) == tuple(unit.shape):
        return unit
    return unit[rows.to(unit.device)[:, None], columns.to(unit.device)]


def put_part(unit: Tensor, rows: Tensor, columns: Tensor, part: Tensor) -> None:
    """Write what ``part_of`` reads."""
    unit[rows.to(unit.device)[:, None], columns.to(unit.device)] = part


def _segments(specs: Sequence[ShardSpec], dim: int, length: int) -> tuple[Range, ...]:
    """The ranges of the packed parts of a dimension: those that its outermost mark names."""
    along = [spec for spec in specs if spec.dim == dim]
    sizes = [length]
    if along and along[0].segments:
        sizes = [segment.size for segment in along[0].segments if segment.size]
    edges = [0]
    for size in sizes:
        edges.append(edges[-1] + size)
    return tuple(zip(edges[:-1], edges[1:], strict=True))


def _length(part: Range) -> int:
    return part[1] - part[0]
