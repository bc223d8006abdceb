"""Copies of what a rank holds, in host memory that is used again."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor

from megablocks_core.ckpt.state.entries import Entries
from megablocks_core.ckpt.state.shares import Piece

_ALIGNMENT = 64  # bytes


class HostCopies:
    """One buffer that holds a copy of the last state; it grows only when a state is larger.

    Attributes:
        buffer: Bytes; pinned once a tensor came from a GPU.
    """

    def __init__(self) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, entries: Entries) -> Entries:
        """The same entries in the buffer, so that whatever happens to the state does not matter.

        What two names share is copied once. Copies from GPUs are done when this returns.
        """
        views: dict[tuple[object, ...], Tensor] = {}
        for share in entries.shares:
            for piece in share.pieces:
                views.setdefault(_region(piece.view), piece.view)
        places, end = {}, 0
        for region, view in views.items():
            places[region] = end
            end += -(-view.nbytes // _ALIGNMENT) * _ALIGNMENT
        devices = {view.device for view in views.values() if view.device.type == "cuda"}
        if end > self.buffer.numel() or (devices and not self.buffer.is_pinned()):
            self.buffer = torch.empty(0, dtype=torch.uint8)  # the old one goes first
            self.buffer = torch.empty(end, dtype=torch.uint8, pin_memory=bool(devices))
        copies = {
            region: self._copy(view, places[region], wait=not devices)
            for region, view in views.items()
        }
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        shares = [
            replace(
                share,
                pieces=[Piece(piece.box, copies[_region(piece.view)]) for piece in share.pieces],
            )
            for share in entries.shares
        ]
        return Entries(shares, deepcopy(entries.state))

    def _copy(self, view: Tensor, start: int, *, wait: bool) -> Tensor:
        room = self.buffer[start : start + view.nbytes].view(view.dtype).view(view.shape)
        return room.copy_(view.detach(), non_blocking=not wait)


def _region(view: Tensor) -> tuple[object, ...]:
    return view.device, view.data_ptr(), view.dtype, tuple(view.shape), view.stride()
