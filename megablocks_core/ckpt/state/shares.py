"""This rank's part of each logical tensor: boxes of the whole, and the memory they lie in.

Marks cut outside, a DTensor's placements inside them, and a flat range cuts what both leave.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from megablocks_core.ckpt.plans.boxes import (
    Shape,
    flat_boxes,
    inside,
    intersection,
    lengths,
    moved,
)
from megablocks_core.ckpt.plans.outlines import Outline
from megablocks_core.files.safetensors import DTYPE_CODES
from megablocks_core.groups import Group, ShardSpec, own_slices, whole_shape
from megablocks_core.groups.cuts import Box
from megablocks_core.groups.placements import is_dtensor, local, placement_specs
from megablocks_core.groups.stacks import separate_name


class Name(NamedTuple):
    """The parts of a tensor's name in a checkpoint: "entry/logical name" or with "/field"."""

    entry: str
    logical: str
    field: str = ""

    def __str__(self) -> str:
        return "/".join(part for part in self if part)

    def row(self, each: str, index: int) -> str:
        """The name of one tensor of the stack that this names."""
        return str(self._replace(logical=separate_name(self.logical, each, index)))


class Piece(NamedTuple):
    """A box of a whole tensor, and a view of the memory that holds it, of any strides."""

    box: Box
    view: Tensor


@dataclass(frozen=True)
class Share:
    """This rank's part of one logical tensor.

    Attributes:
        name: "entry/logical name".
        dtype: Of the tensor.
        shape: Of the whole.
        pieces: What this rank holds of it.
        whole: Whether one writer brings it together, or holders write what they hold.
    """

    name: str
    dtype: torch.dtype
    shape: Shape
    pieces: list[Piece]
    whole: bool = True

    @property
    def outline(self) -> Outline:
        """The share without its values."""
        boxes = [piece.box for piece in self.pieces]
        return Outline(self.name, self.dtype, self.shape, boxes, self.whole)

    def view(self, box: Box) -> Tensor:
        """The memory of a box that lies in one of the pieces."""
        if 0 in lengths(box):
            return torch.empty(lengths(box), dtype=self.dtype)
        for piece in self.pieces:
            if _contains(piece.box, box):
                return piece.view[inside(box, piece.box)]
        raise AssertionError(f"{self.name}: this rank does not hold {box}")


def tensor_shares(
    name: Name, tensor: Tensor, specs: tuple[ShardSpec, ...], *, group: Group, whole: bool = True
) -> list[Share]:
    """The share of a tensor that is cut by ``specs``, or those of the tensors that it stacks.

    Args:
        name: Of the tensor.
        tensor: This rank's share by ``specs``, or a DTensor whose placements cut that share.
        specs: The marks.
        group: All ranks that hold a part.
        whole: As in ``Share``.

    Raises:
        ValueError: The tensor is on meta, sparse or of a dtype that has no form in a
            checkpoint, a rank outside ``group`` holds a part of it, or its placements are not
            served.
    """
    _check_ranks(name, specs, group)
    _check_memory(name, tensor)
    held, placed = _placed(name, tensor, group)
    shape = whole_shape(tuple(tensor.shape), specs)
    pieces = [Piece(box, held[mine]) for box, mine in own_slices((*specs, *placed), shape)]
    return _apart(name, tensor.dtype, shape, pieces, specs, whole=whole)


def flat_shares(
    name: Name,
    tensor: Tensor,
    flat: tuple[int, int],
    specs: tuple[ShardSpec, ...],
    *,
    local_shape: Shape,
    group: Group,
) -> list[Share]:
    """The share of a field of which ``tensor`` holds a range of the flattened local share.

    Args:
        name: Of the field.
        tensor: One-dimensional, as long as the range.
        flat: The range [start, stop) of elements of the share, whose end it may pass (padding).
        specs: The parameter's marks.
        local_shape: The shape of the share.
        group: All ranks that hold a part.

    Raises:
        ValueError: ``tensor`` is not as long as the range, or a rank outside ``group`` holds a
            part.
    """
    _check_ranks(name, specs, group)
    _check_memory(name, tensor)
    start, stop = flat
    if not 0 <= start <= stop or tuple(tensor.shape) != (stop - start,):
        raise ValueError(
            f"{name}: flat={flat} must be a range of {tuple(tensor.shape)}, its tensor's shape"
        )
    shape, memory = whole_shape(local_shape, specs), tensor.detach()
    pieces, at = [], 0
    for run in flat_boxes(start, min(stop, prod(local_shape)), local_shape):
        view = memory[at : at + prod(lengths(run))].view(lengths(run))
        at += view.numel()
        for box, mine in own_slices(specs, shape):
            both = intersection(run, mine)
            if both is not None:
                pieces.append(Piece(moved(inside(both, mine), box), view[inside(both, run)]))
    return _apart(name, tensor.dtype, shape, pieces, specs, whole=False)


def number_shares(
    name: Name, tensor: Tensor, specs: tuple[ShardSpec, ...], *, local_shape: Shape
) -> list[Share]:
    """The share of a number that an optimizer keeps for a whole parameter, such as its step.

    Of a stack, each tensor in it of which this rank holds a part has the number.
    """
    _check_memory(name, tensor)
    each, names = getattr(specs, "each", None), [str(name)]
    if each is not None:
        boxes = own_slices(specs, whole_shape(local_shape, specs))
        rows = sorted({row for box, _ in boxes for row in range(box[0].start, box[0].stop)})
        names = [name.row(each, row) for row in rows]
    memory = tensor.detach()
    return [Share(one, tensor.dtype, (), [Piece((), memory)], False) for one in names]


def joined(shares: Iterable[Share]) -> list[Share]:
    """One share for each name: a field may come in several ranges.

    Raises:
        ValueError: Two pieces of a share overlap.
    """
    found: dict[str, Share] = {}
    for share in shares:
        first = found.setdefault(share.name, share)
        if first is not share:
            for piece in share.pieces:
                if any(intersection(piece.box, other.box) is not None for other in first.pieces):
                    raise ValueError(f"{share.name}: two ranges of this rank overlap")
            first.pieces.extend(share.pieces)
    return list(found.values())


def _contains(outer: Box, box: Box) -> bool:
    for part, around in zip(box, outer, strict=True):
        if part.start < around.start or part.stop > around.stop:
            return False
    return True


def _check_memory(name: Name, tensor: Tensor) -> None:
    if tensor.is_meta:
        raise ValueError(f"{name} is on meta; it must hold its values")
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise ValueError(f"{name} must be a dense tensor, neither sparse nor nested")
    if tensor.dtype not in DTYPE_CODES:
        raise ValueError(
            f"{name} is of {tensor.dtype}, which must be of {', '.join(DTYPE_CODES.values())}"
        )


def _check_ranks(name: Name, specs: tuple[ShardSpec, ...], group: Group) -> None:
    for spec in specs:
        if spec.group.size > 1:
            _check_inside(name, spec.group.ranks, group)


def _check_inside(name: Name, ranks: Iterable[int], group: Group) -> None:
    if not set(ranks) <= set(group.ranks):
        raise ValueError(f"group={group} must include the ranks {list(ranks)} that hold {name}")


def _placed(name: Name, tensor: Tensor, group: Group) -> tuple[Tensor, tuple[ShardSpec, ...]]:
    """The local tensor, and the cuts that a DTensor's placements make, as if they were marks."""
    if not is_dtensor(tensor):
        return tensor.detach(), ()
    mesh = tensor.device_mesh
    if mesh.size() > 1:
        _check_inside(name, mesh.mesh.flatten().tolist(), group)
    try:
        specs = placement_specs(tensor)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    held, mine = local(tensor).detach(), tuple(tensor.shape)
    for spec in specs:
        mine = (*mine[: spec.dim], spec.held_length(mine[spec.dim]), *mine[spec.dim + 1 :])
    if tuple(held.shape) != mine:
        raise ValueError(
            f"{name}: this rank must hold {mine} by placements={tensor.placements}, "
            f"not {tuple(held.shape)}"
        )
    return held, specs


def _apart(
    name: Name,
    dtype: torch.dtype,
    shape: Shape,
    pieces: list[Piece],
    specs: tuple[ShardSpec, ...],
    *,
    whole: bool,
) -> list[Share]:
    """One share or, if the marks say so, those of the tensors that dimension 0 stacks."""
    each = getattr(specs, "each", None)
    if each is None:
        return [Share(str(name), dtype, shape, pieces, whole)]
    rows: dict[int, list[Piece]] = {}
    for (first, *rest), view in pieces:
        for row, part in zip(range(first.start, first.stop), view, strict=True):
            rows.setdefault(row, []).append(Piece(tuple(rest), part))
    return [Share(name.row(each, row), dtype, shape[1:], rows[row], whole) for row in sorted(rows)]
