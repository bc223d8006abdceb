"""Arithmetic of boxes: which elements of a whole tensor are meant, without the tensor.

A box is a tuple of slices with a start and a stop, one for each dimension. Many boxes at once
are an array of int64, [boxes, 2, dimensions]: starts and stops.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from math import prod

import numpy as np

from megablocks_core.groups.cuts import Box

Shape = tuple[int, ...]
_MOST_CORNERS, _MOST_PAIRED = 2**23, 2**10


def whole_box(shape: Shape) -> Box:
    """The box of all elements."""
    return tuple(slice(0, length) for length in shape)


def lengths(box: Box) -> Shape:
    """The shape of a box."""
    return tuple(part.stop - part.start for part in box)


def intersection(one: Box, other: Box) -> Box | None:
    """What both boxes hold, or ``None`` if that is nothing."""
    both = tuple(
        slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True)
    )
    return both if all(part.start < part.stop for part in both) else None


def inside(box: Box, outer: Box) -> Box:
    """``box`` counted from the start of ``outer``."""
    return tuple(
        slice(part.start - from_.start, part.stop - from_.start)
        for part, from_ in zip(box, outer, strict=True)
    )


def moved(box: Box, outer: Box) -> Box:
    """``box``, which is counted from the start of ``outer``, counted as ``outer`` is."""
    return tuple(
        slice(part.start + from_.start, part.stop + from_.start)
        for part, from_ in zip(box, outer, strict=True)
    )


def flat_boxes(start: int, stop: int, shape: Shape) -> list[Box]:
    """Elements [start, stop) of a flattened tensor of ``shape``, as boxes in flat order.

    At most two for each dimension but the last, and one more: part of a row, whole rows, part
    of a row.
    """
    if start >= stop or 0 in shape:
        return []
    if not shape:
        return [()]
    row = prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last:
        base = first * row
        return _rows(first, flat_boxes(start - base, stop - base, shape[1:]))
    boxes: list[Box] = []
    if start % row:
        boxes += _rows(first, flat_boxes(start - first * row, row, shape[1:]))
        first += 1
    whole = stop // row
    if first < whole:
        boxes.append((slice(first, whole), *whole_box(shape[1:])))
    if stop % row:
        boxes += _rows(last, flat_boxes(0, stop - last * row, shape[1:]))
    return boxes


def _rows(index: int, boxes: list[Box]) -> list[Box]:
    return [(slice(index, index + 1), *box) for box in boxes]


def as_array(boxes: Sequence[Box], num_dims: int) -> np.ndarray:
    """Boxes as an array [boxes, 2, dimensions]."""
    ends = [[[part.start for part in box], [part.stop for part in box]] for box in boxes]
    return np.array(ends, dtype=np.int64).reshape(len(boxes), 2, num_dims)


def as_boxes(array: np.ndarray) -> list[Box]:
    """The boxes of an array [boxes, 2, dimensions]."""
    return [tuple(map(slice, starts, stops)) for starts, stops in array.tolist()]


def sizes(array: np.ndarray) -> np.ndarray:
    """Number of elements of each box."""
    return np.prod(array[:, 1] - array[:, 0], axis=1, dtype=np.int64)


def tile(array: np.ndarray, shape: Shape) -> bool:
    """Whether the boxes hold every element of ``shape`` exactly once, and nothing else.

    Each box is a function that is 1 inside and 0 outside. Its mixed difference is +1 or -1 at its
    corners, and says all about it. So boxes tile a whole exactly if the signed corners of the boxes
    add up to those of the whole: no two boxes need to be compared. Dimensions that no box cuts
    have no say.

    Raises:
        ValueError: There are more than 1,024 boxes, cut in so many dimensions that they have more
            than 2**23 corners.
    """
    ends = np.array([[0] * len(shape), shape], dtype=np.int64)
    cut = np.flatnonzero((array != ends).any(axis=(0, 1)))
    inner, whole = array[:, :, cut], ends[None, :, cut]
    if len(array) << len(cut) > _MOST_CORNERS:
        return _tile_by_pairs(array, shape)
    corners, signs = _signed_corners(inner)
    whole_corners, whole_signs = _signed_corners(whole)
    places = np.concatenate([corners, whole_corners])
    _, which = np.unique(_numbered(places, [shape[dim] for dim in cut]), return_inverse=True)
    total = np.bincount(which, np.concatenate([signs, -whole_signs]))
    return not total.any()


def _signed_corners(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The corners of boxes, [corners, dimensions], and the sign of each."""
    num_dims = array.shape[2]
    corners, signs = [], []
    for ends in product((0, 1), repeat=num_dims):
        corners.append(array[:, list(ends), list(range(num_dims))])
        signs.append(np.full(len(array), (-1) ** sum(ends)))
    return np.concatenate(corners), np.concatenate(signs)


def _numbered(places: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
    """A number for each of some places, [places, dimensions], equal for equal ones only."""
    grown = [length + 1 for length in lengths]
    if prod(grown) < 2**63:
        return places @ _weights(grown)
    return np.unique(places, axis=0, return_inverse=True)[1].reshape(-1)


def _tile_by_pairs(array: np.ndarray, shape: Shape) -> bool:
    if len(array) > _MOST_PAIRED:
        raise ValueError(
            f"{len(array)} boxes of shape {shape} are cut in too many dimensions to be compared"
        )
    boxes = as_boxes(array)
    count = sum(prod(lengths(box)) for box in boxes)
    return count == prod(shape) and not any_meet([box for box in boxes if prod(lengths(box))])


def any_meet(boxes: list[Box]) -> bool:
    """Whether any two of some boxes, none of them empty, have an element in common.

    A sweep along the dimension with the most cuts: each box is compared with those that are
    open where it begins, so that slices of one dimension are compared with their neighbours.
    """
    if len(boxes) < 2:
        return False
    if not boxes[0]:
        return True
    dims = range(len(boxes[0]))
    dim = max(dims, key=lambda dim: len({box[dim].start for box in boxes}))
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda box: box[dim].start):
        open_boxes = [other for other in open_boxes if other[dim].stop > box[dim].start]
        if any(intersection(other, box) is not None for other in open_boxes):
            return True
        open_boxes.append(box)
    return False


def strides(shape: Shape) -> np.ndarray:
    """Weights that give the starts, and the ends, of different boxes inside ``shape`` different
    numbers. Boxes do not differ in dimensions of one element.
    """
    return _weights([length if length == 1 else length + 1 for length in shape])


def _weights(lengths: Sequence[int]) -> np.ndarray:
    return np.array([prod(lengths[dim + 1 :]) for dim in range(len(lengths))], dtype=np.int64)


def cells(boxes: Sequence[Box]) -> list[tuple[Box, list[int]]]:
    """Cut boxes that may overlap where one begins or ends: disjoint cells, and who holds each.

    Returns:
        (cell, numbers of the boxes that hold it), in row-major order of where the cells begin.
    """
    found: list[tuple[Box, list[int]]] = [((), list(range(len(boxes))))]
    for dim in range(len(boxes[0]) if boxes else 0):
        found = [
            ((*cell, span), inner)
            for cell, holders in found
            for span, inner in _spans([boxes[index][dim] for index in holders], holders)
        ]
    return found if boxes else []


def _spans(parts: list[slice], holders: list[int]) -> list[tuple[slice, list[int]]]:
    ends = sorted({end for part in parts for end in (part.start, part.stop)})
    spans = []
    for start, stop in pairwise(ends):
        inner = [
            index
            for part, index in zip(parts, holders, strict=True)
            if part.start <= start < part.stop
        ]
        if inner:
            spans.append((slice(start, stop), inner))
    return spans


def split(box: Box, most: int) -> list[Box]:
    """Cut a box into boxes of at most ``most`` elements (1 or more), in row-major order."""
    shape = lengths(box)
    if prod(shape) <= most:
        return [box]
    dim = next(dim for dim in range(len(shape)) if prod(shape[dim + 1 :]) <= most)
    step, last = most // prod(shape[dim + 1 :]), box[dim].stop
    spans = [slice(at, min(at + step, last)) for at in range(box[dim].start, last, step)]
    outer = [[slice(at, at + 1) for at in range(part.start, part.stop)] for part in box[:dim]]
    return [(*rows, span, *box[dim + 1 :]) for rows in product(*outer) for span in spans]
