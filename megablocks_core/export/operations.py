"""Operations that lead from tensors of files to ours, each with its inverse.

An operation takes some tensors and gives some, all of them lazy; no process group and no file is
touched here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from megablocks_core.export.lazies import Box, Lazy, Shape, View, resized, shape_of, with_ends

# Between two pieces of a part: values that are read along, for less than another call.
_NEAR = 2**15


class Operation(Protocol):
    """A step from tensors of files to ours, or back.

    Attributes:
        takes: How many tensors it takes.
    """

    @property
    def takes(self) -> int: ...  # noqa: D102 (said above)

    @property
    def inverse(self) -> Operation:
        """What undoes it."""
        ...

    def __call__(self, tensors: Sequence[Lazy]) -> list[Lazy]:
        """Apply it to ``takes`` tensors.

        Raises:
            ValueError: A shape is not what it works on.
        """
        ...


def apply(operations: Sequence[Operation], tensors: Sequence[Lazy]) -> list[Lazy]:
    """Apply operations one behind the other, each to all tensors, as many as it takes at a time."""
    held = list(tensors)
    for operation in operations:
        count = operation.takes
        if len(held) % count:
            raise ValueError(f"{operation} takes {count} tensors at a time, not {len(held)}")
        groups = [held[first : first + count] for first in range(0, len(held), count)]
        held = [made for group in groups for made in operation(group)]
    return held


def inverses(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """What undoes ``operations``."""
    return tuple(operation.inverse for operation in reversed(operations))


@dataclass(frozen=True)
class Split:
    """One tensor into parts that lie side by side, in each of ``groups`` equal groups.

    ``groups=1`` undoes a concatenation. With more, a part is made of its pieces in all groups:
    ``Split((1, 1), groups=n)`` takes rows apart that alternate.

    Attributes:
        sizes: Of each part, within one group.
        dim: The dimension that is split.
        groups: How many times the parts come.
    """

    sizes: tuple[int, ...]
    dim: int = 0
    groups: int = 1
    takes = 1

    @property
    def inverse(self) -> Operation:
        """Puts the parts side by side again."""
        return Join(self.sizes, self.dim, self.groups)

    def __call__(self, tensors: Sequence[Lazy]) -> list[Lazy]:
        """The parts of the one tensor."""
        (whole,) = tensors
        shape = shape_of(whole)
        _check_size(self, shape, self.dim, sum(self.sizes) * self.groups)
        starts = accumulate(self.sizes, initial=0)
        return [
            View(
                resized(shape, self.dim, size * self.groups),
                whole.get_dtype(),
                self._reader(whole, start, size),
            )
            for start, size in zip(starts, self.sizes, strict=False)
        ]

    def _reader(self, whole: Lazy, start: int, size: int) -> Callable[[Box], Tensor]:
        dim, span = self.dim, sum(self.sizes)

        def read(box: Box) -> Tensor:
            first, last = box[dim].start, box[dim].stop
            if first == last:
                return whole[with_ends(box, dim, 0, 0)]
            groups = range(first // size, -(-last // size))
            between = (span - size) * prod(part.stop - part.start for part in box[dim + 1 :])
            if len(groups) > 1 and between < _NEAR:
                found = whole[with_ends(box, dim, groups.start * span, groups.stop * span)]
                own = _grouped(found, dim, len(groups)).narrow(dim + 1, start, size)
                before = first - groups.start * size
                return own.flatten(dim, dim + 1).narrow(dim, before, last - first)
            found = []
            for group in groups:
                low, high = max(first - group * size, 0), min(last - group * size, size)
                begin = group * span + start
                found.append(whole[with_ends(box, dim, begin + low, begin + high)])
            return found[0] if len(found) == 1 else torch.cat(found, dim)

        return read


@dataclass(frozen=True)
class Join:
    """Parts into one tensor, side by side in each of ``groups`` groups; undoes ``Split``.

    Attributes:
        sizes: Of each part, within one group.
        dim: The dimension along which they are joined.
        groups: How many times the parts come.
    """

    sizes: tuple[int, ...]
    dim: int = 0
    groups: int = 1

    @property
    def takes(self) -> int:
        """As many as there are sizes."""
        return len(self.sizes)

    @property
    def inverse(self) -> Operation:
        """Takes the parts apart again."""
        return Split(self.sizes, self.dim, self.groups)

    def __call__(self, tensors: Sequence[Lazy]) -> list[Lazy]:
        """The one tensor of its parts."""
        shapes = [shape_of(part) for part in tensors]
        for shape, size in zip(shapes, self.sizes, strict=True):
            _check_size(self, shape, self.dim, size * self.groups)
            if resized(shape, self.dim, 0) != resized(shapes[0], self.dim, 0):
                raise ValueError(f"{self} joins what is alike but in its dim, not {shapes}")
        whole = resized(shapes[0], self.dim, sum(self.sizes) * self.groups)
        return [View(whole, tensors[0].get_dtype(), self._reader(tensors))]

    def _reader(self, parts: Sequence[Lazy]) -> Callable[[Box], Tensor]:
        dim, span = self.dim, sum(self.sizes)
        starts = list(accumulate(self.sizes, initial=0))

        def read(box: Box) -> Tensor:
            first, last = box[dim].start, box[dim].stop
            if first == last:
                return parts[0][with_ends(box, dim, 0, 0)]
            found = []
            for part, start, size in zip(parts, starts, self.sizes, strict=False):
                low, high = (_before(row, span, start, size) for row in (first, last))
                if low < high:
                    found.append((start, size, low, part[with_ends(box, dim, low, high)]))
            if len(found) == 1:
                return found[0][-1]
            values = found[0][-1]
            made = values.new_empty(resized(tuple(values.shape), dim, last - first))
            for begin, end in _stretches(first, last, span):
                count = max(1, (end - begin) // span)
                into = _grouped(made.narrow(dim, begin - first, end - begin), dim, count)
                for start, size, before, values in found:
                    low, high = (_before(row, span, start, size) for row in (begin, end))
                    if low < high:
                        own = _grouped(values.narrow(dim, low - before, high - low), dim, count)
                        at = max(start - begin % span, 0)
                        into.narrow(dim + 1, at, own.shape[dim + 1]).copy_(own)
            return made

        return read


@dataclass(frozen=True)
class Unstack:
    """One tensor into those of its first dimension, as the experts of a stack.

    Attributes:
        count: The length of that dimension.
    """

    count: int
    takes = 1

    @property
    def inverse(self) -> Operation:
        """Stacks them again."""
        return Stack(self.count)

    def __call__(self, tensors: Sequence[Lazy]) -> list[Lazy]:
        """The tensors of the stack."""
        (whole,) = tensors
        shape = shape_of(whole)
        _check_size(self, shape, 0, self.count)

        def reader(index: int) -> Callable[[Box], Tensor]:
            return lambda box: whole[(slice(index, index + 1), *box)].squeeze(0)

        dtype = whole.get_dtype()
        return [View(shape[1:], dtype, reader(index)) for index in range(self.count)]


@dataclass(frozen=True)
class Stack:
    """Tensors of one shape into one, along a new first dimension; undoes ``Unstack``.

    Attributes:
        count: How many.
    """

    count: int

    @property
    def takes(self) -> int:
        """As many as are stacked."""
        return self.count

    @property
    def inverse(self) -> Operation:
        """Takes the stack apart."""
        return Unstack(self.count)

    def __call__(self, tensors: Sequence[Lazy]) -> list[Lazy]:
        """The stack."""
        shapes = {shape_of(part) for part in tensors}
        if len(shapes) > 1:
            raise ValueError(f"{self} takes tensors of one shape, not {sorted(shapes)}")

        def read(box: Box) -> Tensor:
            which, *inside = box
            found = [part[tuple(inside)] for part in tensors[which]]
            return torch.stack(found) if found else tensors[0][tuple(inside)].unsqueeze(0)[:0]

        return [View((self.count, *shapes.pop()), tensors[0].get_dtype(), read)]


@dataclass(frozen=True)
class Transpose:
    """Swaps two dimensions; undoes itself.

    Attributes:
        dim: One dimension.
        other: The other.
    """

    dim: int = 0
    other: int = 1
    takes = 1

    @property
    def inverse(self) -> Operation:
        """The same."""
        return self

    def __call__(self, tensors: Sequence[Lazy]) -> list[Lazy]:
        """The tensor with its dimensions swapped."""
        (whole,) = tensors
        shape = self._swapped(shape_of(whole))

        def read(box: Box) -> Tensor:
            return whole[self._swapped(box)].transpose(self.dim, self.other)

        return [View(shape, whole.get_dtype(), read)]

    def _swapped(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        found = list(values)
        if max(self.dim, self.other) >= len(found):
            raise ValueError(f"{self} must be of dimensions that {len(found)} dimensions have")
        found[self.dim], found[self.other] = found[self.other], found[self.dim]
        return tuple(found)


@dataclass(frozen=True)
class Resize:
    """Adds zeros behind the last rows, or cuts rows off, as a padded vocabulary has more.

    Adding undoes cutting only where zeros were cut.

    Attributes:
        before: Rows that a tensor has.
        after: Rows that it shall have.
        dim: The dimension of the rows.
    """

    before: int
    after: int
    dim: int = 0
    takes = 1

    @property
    def inverse(self) -> Operation:
        """Back to as many rows as before."""
        return Resize(self.after, self.before, self.dim)

    def __call__(self, tensors: Sequence[Lazy]) -> list[Lazy]:
        """The tensor with more rows, or fewer."""
        (whole,) = tensors
        shape, dim = shape_of(whole), self.dim
        _check_size(self, shape, dim, self.before)

        def read(box: Box) -> Tensor:
            first, last = box[dim].start, box[dim].stop
            ends = min(first, self.before), min(last, self.before)
            found = whole[with_ends(box, dim, *ends)]
            missing = (last - first) - (ends[1] - ends[0])
            if not missing:
                return found
            zeros = found.new_zeros(resized(tuple(found.shape), dim, missing))
            return torch.cat([found, zeros], dim)

        return [View(resized(shape, dim, self.after), whole.get_dtype(), read)]


@dataclass(frozen=True)
class Offset:
    """Adds a number, as norms have it whose weights are stored around zero.

    Exact to rounding alone: where bits must come back, a layer knows the offset instead.

    Attributes:
        by: The number.
    """

    by: float
    takes = 1

    @property
    def inverse(self) -> Operation:
        """Subtracts it."""
        return Offset(-self.by)

    def __call__(self, tensors: Sequence[Lazy]) -> list[Lazy]:
        """The sum."""
        return [_mapped(tensors[0], lambda values: values + self.by)]


@dataclass(frozen=True)
class Decay:
    """``A = -exp(A_log)``, the decay rates of state-space layers; exact to rounding."""

    takes = 1

    @property
    def inverse(self) -> Operation:
        """``A_log = log(-A)``."""
        return LogDecay()

    def __call__(self, tensors: Sequence[Lazy]) -> list[Lazy]:
        """The rates."""
        return [_mapped(tensors[0], lambda values: -values.exp())]


@dataclass(frozen=True)
class LogDecay:
    """``A_log = log(-A)``; undoes ``Decay``."""

    takes = 1

    @property
    def inverse(self) -> Operation:
        """``A = -exp(A_log)``."""
        return Decay()

    def __call__(self, tensors: Sequence[Lazy]) -> list[Lazy]:
        """The logarithms."""
        return [_mapped(tensors[0], lambda values: (-values).log())]


def _mapped(whole: Lazy, function: Callable[[Tensor], Tensor]) -> Lazy:
    """Each value through a function, computed in float64 and rounded once."""

    def read(box: Box) -> Tensor:
        values = whole[box]
        return function(values.double()).to(values.dtype)

    return View(shape_of(whole), whole.get_dtype(), read)


def _before(row: int, span: int, start: int, size: int) -> int:
    """How many rows of a part lie before a row of the whole, whose groups have ``span`` rows."""
    group, inside = divmod(row, span)
    return group * size + min(max(inside - start, 0), size)


def _stretches(first: int, last: int, span: int) -> list[tuple[int, int]]:
    """Rows [first, last) as those that end a group, whole groups, and those that begin one."""
    up = min(last, -(-first // span) * span)
    down = max(up, last // span * span)
    ends = (first, up), (up, down), (down, last)
    return [(begin, end) for begin, end in ends if begin < end]


def _grouped(tensor: Tensor, dim: int, count: int) -> Tensor:
    """A dimension as ``count`` equal groups, a dimension of their own."""
    return tensor.unflatten(dim, (count, tensor.shape[dim] // count))


def _check_size(operation: Operation, shape: Shape, dim: int, size: int) -> None:
    if dim >= len(shape) or shape[dim] != size:
        raise ValueError(f"{operation} needs size {size} in dim {dim}, not shape {shape}")
