"""States of an optimizer that wait in host memory, and are on the device for their turn alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from megablocks_core.groups.copies import Copies, Copy
from megablocks_core.parallel.memory.host_buffers import HostBuffers, Loan


class Place(NamedTuple):
    """Where a tensor is kept.

    Attributes:
        key: Tells the place from others.
        tensor: What is there now.
        put: Puts another there.
    """

    key: Hashable
    tensor: Tensor
    put: Callable[[Tensor], None]


class Part(Protocol):
    """Tensors that have their turn together."""

    device: torch.device

    def places(self) -> list[Place]:
        """All that are there now."""
        ...


AnyPart = TypeVar("AnyPart", bound=Part)


class HostStates:
    """Keeps the tensors of parts in host memory, pinned for CUDA.

    A round copies each tensor once each way. While a part has its turn, the next one's tensors
    come and the last one's go, so those of three parts at most are on the device.
    """

    def __init__(self) -> None:
        self._buffers = HostBuffers()
        self._homes: dict[Hashable, tuple[Tensor, Loan]] = {}
        self._leaving: list[Copy] = []

    @property
    def copies(self) -> Copies:
        """How data come and go."""
        return self._buffers.copies

    def in_turn(self, parts: Sequence[AnyPart]) -> Iterator[AnyPart]:
        """Yield each part while its tensors are on the device."""
        coming = self._bring(parts[0]) if parts else []
        for part, following in zip_longest(parts, parts[1:]):
            for place, there, copy in coming:
                copy.wait()
                place.put(there)
            coming = self._bring(following) if following is not None else []
            yield part
            self.send(part)
        self.settle()

    def send(self, part: Part) -> None:
        """Start to send a part's tensors to the host; those of the part before are gone."""
        self.settle()
        for place in part.places():
            home, _ = self._homes.get(place.key) or self._new_home(place)
            self._leaving.append(self.copies.start(place.tensor, home))
            place.put(home)

    def settle(self) -> None:
        """Wait until all that was sent has left the device."""
        for copy in self._leaving:
            copy.wait()
        self._leaving = []

    def _bring(self, part: Part) -> list[tuple[Place, Tensor, Copy]]:
        """Start to bring what waits on the host; what was just made is there already."""
        coming = []
        for place in part.places():
            if place.key in self._homes or place.tensor.device != part.device:
                there = torch.empty_like(place.tensor, device=part.device)
                coming.append((place, there, self.copies.start(place.tensor, there)))
        return coming

    def _new_home(self, place: Place) -> tuple[Tensor, Loan]:
        x = place.tensor
        loan = self._buffers.take(x.nbytes, pinned=x.device.type == "cuda")
        self._homes[place.key] = loan.bytes.view(x.dtype).view(x.shape), loan
        return self._homes[place.key]
