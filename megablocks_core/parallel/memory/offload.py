"""Offloading: what forward saves for backward waits in host memory."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from megablocks_core.groups.copies import Copy
from megablocks_core.parallel.memory.held import Held, Version, hooks_around
from megablocks_core.parallel.memory.host_buffers import HostBuffers, Loan


@dataclass
class Offloaded:
    """What one ``offload`` has moved.

    Attributes:
        bytes: To the host.
        tensors: Their number, each piece of memory once.
    """

    bytes: int = 0
    tensors: int = 0


@contextmanager
def offload(
    buffers: HostBuffers, *, min_bytes: int = 1 << 16, from_host: bool = False
) -> Iterator[Offloaded]:
    """Let the tensors that are saved for backward wait in ``buffers``.

        buffers = HostBuffers()  # once
        with offload(buffers) as moved:
            loss = model(x)
        loss.backward()

    Outputs and gradients are those without it, to the bit. Memory goes as a whole: each storage
    once, however many saved tensors lie in it. It leaves while forward goes on and comes back
    in reverse order, each piece while backward works on the one saved after it. With
    ``recompute`` inside, what moves are the inputs of its regions.

    Stay where they are: parameters, leaves that collect gradients, and views of them; tensors
    on the host; memory of less than ``min_bytes``; tensors of other classes and layouts.

    Sends nothing between ranks. Moved are, there and back, the bytes of the storages of saved
    tensors that do not stay. Back on the device are those that backward works on, and one more.

    Args:
        buffers: Where to; may serve several graphs at a time.
        min_bytes: What is smaller stays.
        from_host: Move memory of the host too, such as in tests and to count.

    Yields:
        What was moved, counted as it goes.

    Raises:
        ValueError: ``min_bytes`` is not whole, or negative.
        RuntimeError: In backward: a saved tensor was changed in place, as in torch.
    """
    if not (hasattr(min_bytes, "__index__") and min_bytes >= 0):
        raise ValueError(f"min_bytes={min_bytes!r} must be a whole number of 0 or more")
    session = _Session(buffers, min_bytes, from_host)
    with saved_tensors_hooks(session.pack, session.unpack):
        try:
            yield session.moved
        finally:
            session.finish()


class _Session:
    """The saved tensors of one ``offload``."""

    def __init__(self, buffers: HostBuffers, min_bytes: int, from_host: bool) -> None:
        self.buffers, self.min_bytes, self.from_host = buffers, min_bytes, from_host
        self.moved = Offloaded()
        # Hooks hide those around them.
        self.outer_pack, self.outer_unpack = hooks_around() or (Held, Held.tensor)
        self._order: list[weakref.ref[_Piece]] = []
        self._known: weakref.WeakValueDictionary[int, _Piece] = weakref.WeakValueDictionary()
        self._leaving: Copy | None = None

    def pack(self, x: Tensor) -> Any:
        """In forward."""
        if self._stays(x):
            return self.outer_pack(x)
        storage = x.untyped_storage()
        piece = self._known.get(storage._cdata)
        if piece is None or not piece.holds(x):
            piece = self._moved(x)
        piece.uses += 1
        return _Packed(piece, x.dtype, x.shape, x.stride(), int(x.storage_offset()))

    def unpack(self, packed: Any) -> Tensor:
        """In backward."""
        if not isinstance(packed, _Packed):
            return self.outer_unpack(packed)
        memory = packed.piece.brought_back()
        self._start_back_before(packed.piece)
        x = torch.empty(0, dtype=packed.dtype, device=memory.device)
        return x.set_(memory.untyped_storage(), packed.offset, packed.size, packed.stride)

    def finish(self) -> None:
        """At the end of forward: what is under way has left."""
        if self._leaving is not None:
            self._leaving.wait()
            self._leaving = None

    def _start_back_before(self, current: "_Piece") -> None:
        """Backward asks next for what was saved before, if this walk has not had it yet."""
        walk = (current.used - 1) // current.uses
        for index in range(current.place - 1, -1, -1):
            piece = self._order[index]()
            if piece is not None and piece.used // piece.uses <= walk:
                return piece.start_back()

    def _stays(self, x: Tensor) -> bool:
        return (
            type(x) is not Tensor
            or _is_held(x)
            or (x._base is not None and _is_held(x._base))
            or x.layout != torch.strided
            or x.is_conj()
            or x.is_neg()
            or x.untyped_storage().nbytes() < max(self.min_bytes, 1)
            or (x.device.type == "cpu" and not self.from_host)
            or x.device.type == "meta"
        )

    def _moved(self, x: Tensor) -> "_Piece":
        storage = x.untyped_storage()
        loan = self.buffers.take(storage.nbytes(), pinned=x.device.type == "cuda")
        piece = _Piece(x, loan, self.buffers, place=len(self._order))
        source = torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage)
        self.finish()
        self._leaving = self.buffers.copies.start(source, loan.bytes)
        self._order.append(weakref.ref(piece))
        self._known[storage._cdata] = piece
        self.moved.bytes += storage.nbytes()
        self.moved.tensors += 1
        return piece


class _Piece:
    """The memory of one storage, on the host; it lives as long as the graph needs it."""

    def __init__(self, x: Tensor, loan: Loan, buffers: HostBuffers, *, place: int) -> None:
        self.loan, self.buffers, self.place = loan, buffers, place
        self.device, self.version = x.device, Version(x)
        self.storage = StorageWeakRef(x.untyped_storage())
        self.uses = self.used = 0
        self._back: Tensor | None = None
        self._coming: Copy | None = None

    def holds(self, x: Tensor) -> bool:
        """Whether this is the memory of ``x``, as it is now."""
        same = not self.storage.expired() and self.storage.cdata == x.untyped_storage()._cdata
        return same and self.version.current and self.version.counts(x)

    def start_back(self) -> None:
        """Start to bring it back, unless it is there or under way."""
        if self._back is None:
            size = len(self.loan.bytes)
            self._back = torch.empty(size, dtype=torch.uint8, device=self.device)
            self._coming = self.buffers.copies.start(self.loan.bytes, self._back)

    def brought_back(self) -> Tensor:
        """The bytes; held on the device until all saved tensors in them were asked for."""
        self.version.check()
        self.start_back()
        if self._coming is not None:
            self._coming.wait()
            self._coming = None
        memory = self._back
        assert memory is not None
        self.used += 1
        if self.used % self.uses == 0:
            self._back = None
        return memory


class _Packed(NamedTuple):
    """A saved tensor: where it lies in a piece."""

    piece: _Piece
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _is_held(x: Tensor) -> bool:
    """Whether somebody holds the memory for longer than a graph."""
    return isinstance(x, nn.Parameter) or (x.is_leaf and x.requires_grad)
