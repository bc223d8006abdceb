"""The memory of one bucket of gradients: what arrives in backward, and what ``.grad`` shows.

Each contribution is written, scaled, to a flat buffer as it comes; ``.grad`` is not touched
until backward is over. So what was reduced before and what is new never mix: a reduced sum is
added to an earlier one, and each contribution is scaled and reduced once.

A parameter's place in the buffer holds nothing, this rank's sum from earlier backwards (under
``no_sync``), or one to which the running backward has added. Three kinds of buffer differ in
what they show: the buffer itself (``AliasedBuffer``), rounded copies (``CastBuffer``) or
a stand-in (``HiddenBuffer``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megablocks_core.groups.gradient_shards import show_sharded
from megablocks_core.parallel.data_parallel.buckets import Bucket


class Place(Enum):
    """What a parameter's place in the buffer holds."""

    EMPTY = 0
    EARLIER = 1
    NOW = 2


class Shown(NamedTuple):
    """A gradient that a user sees, and the version in which it shows what the buffer has."""

    gradient: Tensor
    version: int


class Memory(NamedTuple):
    """Flat memory [L], its view for each parameter, and how many tensors lie in it so far."""

    flat: Tensor
    views: list[Tensor]
    uses: int

    def is_free(self) -> bool:
        """Whether nobody else holds a tensor in it."""
        return _uses(self.flat) == self.uses


class GradientBuffer(ABC):
    """Flat memory for the gradients of one bucket.

    Args:
        bucket: The parameters' places.
        parameters: They themselves, one for each slot.
        dtype: In which contributions are summed.
        scale: Multiplies each contribution, once.
    """

    def __init__(
        self,
        bucket: Bucket,
        parameters: Sequence[nn.Parameter],
        *,
        dtype: torch.dtype,
        scale: float,
    ) -> None:
        self.bucket, self.parameters = bucket, list(parameters)
        self.dtype, self.scale = dtype, scale
        self._memory: Memory | None = None
        self._places = [Place.EMPTY] * len(parameters)
        self._open = False  # whether places may be in use
        self._own: dict[int, Shown] = {}  # the gradients that show this rank's sums

    @property
    def flat(self) -> Tensor:
        """The buffer, between ``fill`` and ``give``."""
        assert self._memory is not None
        return self._memory.flat

    def take(self, slot: int, gradient: Tensor) -> None:
        """Add a contribution of the running backward."""
        view = self._begin()[slot]
        place = self._places[slot]
        if place is Place.EARLIER:
            place = self._still(slot, view)
        if place is not Place.EMPTY:
            view.add_(gradient, alpha=self.scale)
        elif gradient.dtype == self.dtype:
            torch.mul(gradient, self.scale, out=view)
        else:  # widened first: 16 bits may not hold the scaled value
            view.copy_(gradient)
            if self.scale != 1.0:
                view.mul_(self.scale)
        self._places[slot] = Place.NOW

    def fill(self) -> list[bool]:
        """Make the whole buffer what this rank sends: zeros where it holds nothing.

        Returns, for each slot, whether this rank has a gradient.
        """
        for slot, view in enumerate(self._begin()):
            if self._places[slot] is Place.EARLIER:
                self._places[slot] = self._still(slot, view)
            if self._places[slot] is Place.EMPTY:
                view.zero_()
        used = self.bucket.slots[-1].stop
        if used < self.bucket.length:
            self.flat[used:].zero_()
        return [place is not Place.EMPTY for place in self._places]

    def keep(self) -> None:
        """End a backward that reduces nothing: show this rank's sums, and go on from them."""
        for slot, place in enumerate(self._places):
            if place is Place.NOW:
                self._show_own(slot, self._begin()[slot])
                self._places[slot] = Place.EARLIER

    def give(self, used: Sequence[bool]) -> None:
        """End a backward whose sums over all ranks now stand in the buffer.

        Args:
            used: For each slot, whether any rank has a gradient.
        """
        self._show_reduced(self._views(), used)
        self.drop()

    def drop(self) -> None:
        """Forget what the places hold."""
        self._places = [Place.EMPTY] * len(self._places)
        self._open = False
        self._own.clear()

    def free(self) -> None:
        """Forget what the places hold, and give the memory back."""
        self.drop()
        self._memory = None

    def holds_own(self) -> bool:
        """Whether it holds sums of this rank that no message has taken yet."""
        return any(
            place is Place.NOW
            or (place is Place.EARLIER and self._still(slot, view) is not Place.EMPTY)
            for slot, (place, view) in enumerate(zip(self._places, self._views(), strict=False))
        )

    def _views(self) -> list[Tensor]:
        return self._memory.views if self._memory is not None else []

    def _begin(self) -> list[Tensor]:
        """The views of memory that belongs to the places alone."""
        if not self._open:
            self._memory = self._free_memory() or self._new_memory()
            self._open = True
        return self._views()

    def _new_memory(self) -> Memory:
        flat = torch.empty(self.bucket.length, dtype=self.dtype, device=self.bucket.device)
        views = [
            view_as(flat[slot.start : slot.stop], parameter)
            for slot, parameter in zip(self.bucket.slots, self.parameters, strict=True)
        ]
        return Memory(flat, views, _uses(flat))

    @abstractmethod
    def _free_memory(self) -> Memory | None:
        """Memory that may be overwritten, if there is any; asked for while no place is in use."""

    @abstractmethod
    def _still(self, slot: int, view: Tensor) -> Place:
        """What a place holds of earlier backwards, now that the user may have dropped it."""

    @abstractmethod
    def _show_own(self, slot: int, view: Tensor) -> None:
        """Let ``.grad`` show this rank's sum, unless it holds a reduced one."""

    @abstractmethod
    def _show_reduced(self, views: Sequence[Tensor], used: Sequence[bool]) -> None:
        """Set ``.grad`` to the reduced sums, or add them to earlier ones."""


class AliasedBuffer(GradientBuffer):
    """``.grad`` is a view of the buffer. Memory in which a user holds a tensor is left alone."""

    def _free_memory(self) -> Memory | None:
        return self._memory if self._memory is not None and self._memory.is_free() else None

    def _still(self, slot: int, view: Tensor) -> Place:
        parameter = self.parameters[slot]
        if parameter.grad is None:
            return Place.EMPTY
        if slot in self._own and parameter.grad is not self._own[slot].gradient:
            view.copy_(parameter.grad)
            parameter.grad = view.detach()
            self._own[slot] = Shown(parameter.grad, parameter.grad._version)
        return Place.EARLIER

    def _show_own(self, slot: int, view: Tensor) -> None:
        parameter = self.parameters[slot]
        if parameter.grad is None:
            parameter.grad = view.detach()
            self._own[slot] = Shown(parameter.grad, parameter.grad._version)

    def _show_reduced(self, views: Sequence[Tensor], used: Sequence[bool]) -> None:
        for slot, parameter in enumerate(self.parameters):
            if not used[slot]:
                continue
            gradient = parameter.grad
            if gradient is None:
                parameter.grad = views[slot].detach()
            elif slot not in self._own or gradient is not self._own[slot].gradient:
                gradient.add_(views[slot])


class CastBuffer(GradientBuffer):
    """``.grad`` is a copy in the parameter's dtype; sums go on in the buffer's.

    Reduced sums are kept in the buffer's dtype as long as any ``.grad`` shows one, so that
    several backwards round once. A ``.grad`` that the user changed or set counts instead.
    """

    def __init__(
        self,
        bucket: Bucket,
        parameters: Sequence[nn.Parameter],
        *,
        dtype: torch.dtype,
        scale: float,
    ) -> None:
        super().__init__(bucket, parameters, dtype=dtype, scale=scale)
        self._totals: Memory | None = None
        self._reduced: dict[int, Shown] = {}  # the gradients that show reduced sums

    def _free_memory(self) -> Memory | None:
        if self._totals is not None and all(one.grad is None for one in self.parameters):
            self._memory, self._totals = self._totals, None
            self._reduced.clear()
        return self._memory

    def _still(self, slot: int, view: Tensor) -> Place:
        gradient = self.parameters[slot].grad
        if gradient is None:
            return Place.EMPTY
        if slot in self._own and not self._is_shown(slot, self._own):
            view.copy_(gradient)
        return Place.EARLIER

    def _show_own(self, slot: int, view: Tensor) -> None:
        if self.parameters[slot].grad is None or slot in self._own:
            self._own[slot] = self._shown(slot, view)

    def _show_reduced(self, views: Sequence[Tensor], used: Sequence[bool]) -> None:
        for slot, parameter in enumerate(self.parameters):
            view, gradient, total = views[slot], parameter.grad, self._total(slot)
            if used[slot]:
                if total is not None:
                    view.add_(total)
                elif gradient is not None and slot not in self._own:
                    view.add_(gradient)
                self._reduced[slot] = self._shown(slot, view)
            elif total is not None:
                view.copy_(total)
        self._memory, self._totals = self._totals, self._memory

    def _total(self, slot: int) -> Tensor | None:
        """The reduced sum that ``.grad`` shows, if it does."""
        if self._totals is None or not self._is_shown(slot, self._reduced):
            return None
        return self._totals.views[slot]

    def _shown(self, slot: int, view: Tensor) -> Shown:
        parameter = self.parameters[slot]
        gradient = parameter.grad
        if gradient is None:
            gradient = parameter.grad = view.to(parameter.dtype)
        else:
            gradient.copy_(view)
        return Shown(gradient, gradient._version)

    def _is_shown(self, slot: int, where: dict[int, Shown]) -> bool:
        """Whether ``.grad`` is the tensor that was shown, and not changed since."""
        if slot not in where:
            return False
        gradient, version = where[slot]
        return gradient is self.parameters[slot].grad and gradient._version == version


class HiddenBuffer(GradientBuffer):
    """``.grad`` is a stand-in: the owner of the buffer takes the sums itself."""

    def _free_memory(self) -> Memory | None:
        return self._memory

    def _still(self, slot: int, view: Tensor) -> Place:
        return Place.EMPTY if self.parameters[slot].grad is None else Place.EARLIER

    def _show_own(self, slot: int, view: Tensor) -> None:
        show_sharded(self.parameters[slot])

    def _show_reduced(self, views: Sequence[Tensor], used: Sequence[bool]) -> None:
        for parameter, any_rank in zip(self.parameters, used, strict=True):
            if any_rank:
                show_sharded(parameter)


def set_gradient_dtype(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Let ``.grad`` have this dtype; one that is there is cast."""
    if parameter.grad_dtype != dtype:
        gradient, parameter.grad = parameter.grad, None
        parameter.grad_dtype = dtype
        if gradient is not None:
            parameter.grad = gradient.to(dtype)


def view_as(flat: Tensor, parameter: Tensor) -> Tensor:
    """``flat`` in the shape of the parameter, and in its order of memory where that is dense."""
    if not parameter.is_contiguous():
        strides = torch.empty_like(parameter, device="meta").stride()
        if strides == parameter.stride():
            return flat.as_strided(parameter.shape, strides)
    return flat.view(parameter.shape)


def _uses(memory: Tensor) -> int:
    return torch._C._storage_Use_Count(memory.untyped_storage()._cdata)
