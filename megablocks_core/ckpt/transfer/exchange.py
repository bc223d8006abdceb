"""One round of messages: boxes of many tensors, one message for each pair of ranks.

Packing and unpacking may fail (no memory, no disk), so they stand inside ``together``; sending
stands between them, and every rank comes to it or none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megablocks_core.groups import Group, as_bytes
from megablocks_core.groups.swaps import message_device, swap

_ALIGNMENT = 16  # every piece can be seen as its dtype where it lies in a message


class Exchange:
    """What one rank sends and receives in one round.

    Args:
        outgoing: For each other rank the tensors to send, of any strides and device. Ranks that
            are handed the same sequence share one message.
        incoming: For each other rank the tensors to fill, of the shapes and dtypes of those that
            it sends, in the same order.
        group: All ranks.
    """

    def __init__(
        self,
        outgoing: Mapping[int, Sequence[Tensor]],
        incoming: Mapping[int, Sequence[Tensor]],
        *,
        group: Group,
    ) -> None:
        self._group, self._incoming = group, incoming
        device = message_device(group)
        packed: dict[int, Tensor] = {}
        for pieces in outgoing.values():
            if id(pieces) not in packed:
                packed[id(pieces)] = _packed(pieces, device)
        self._outgoing = {rank: packed[id(pieces)] for rank, pieces in outgoing.items()}
        self._arriving = {
            rank: torch.empty(_places(pieces)[1], dtype=torch.uint8, device=device)
            for rank, pieces in incoming.items()
        }

    def send(self) -> None:
        """Send and receive all messages; every rank calls it."""
        swap(self._outgoing, self._arriving, group=self._group)
        self._outgoing = {}

    def unpack(self) -> None:
        """Copy what arrived to where it belongs."""
        for rank, pieces in self._incoming.items():
            message = self._arriving.pop(rank)
            for piece, start in zip(pieces, _places(pieces)[0], strict=True):
                arrived = message[start : start + piece.nbytes].view(piece.dtype)
                piece.copy_(arrived.view(piece.shape))


def _packed(pieces: Sequence[Tensor], device: torch.device) -> Tensor:
    if len(pieces) == 1 and pieces[0].is_contiguous() and pieces[0].device == device:
        return as_bytes(pieces[0].detach())
    starts, size = _places(pieces)
    message = torch.empty(size, dtype=torch.uint8, device=device)
    for piece, start in zip(pieces, starts, strict=True):
        place = message[start : start + piece.nbytes].view(piece.dtype).view(piece.shape)
        place.copy_(piece.detach())
    return message


def _places(pieces: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where each piece begins in its message, and where the last one ends."""
    starts, end = [], 0
    for piece in pieces:
        starts.append(end + -end % _ALIGNMENT)
        end = starts[-1] + piece.nbytes
    return starts, end
