"""What ranks tell each other of a save: much of it is alike, and some is for one rank only."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from megablocks_core.groups import Group
from megablocks_core.groups.swaps import message_device, swap

# Names and boxes shrink to a tenth at the quickest level.
_LEVEL = 1


def all_texts(mine: Sequence[bytes], *, group: Group) -> list[list[bytes]]:
    """The texts of every rank, in rank order.

    They travel compressed, in one message of all. Texts that are equal are one object.
    """
    if group.size == 1:
        return [list(mine)]
    sent = group.all_gather_object([zlib.compress(text, _LEVEL) for text in mine])
    texts = {small: zlib.decompress(small) for small in {one for each in sent for one in each}}
    return [[texts[small] for small in each] for each in sent]


def at_first_rank(value: Any, *, group: Group) -> list[Any]:
    """Every rank's picklable ``value``, in rank order, on the first rank; elsewhere nothing.

    A message of one number from all, and one from each rank to the first.
    """
    if group.size == 1:
        return [value]
    data = b"" if group.rank == 0 else zlib.compress(pickle.dumps(value), _LEVEL)
    sizes = group.all_gather_object(len(data))
    device, incoming = message_device(group), {}
    if group.rank > 0:
        message = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
        swap({0: message}, {}, group=group)
        return []
    for rank, size in enumerate(sizes[1:], 1):
        incoming[rank] = torch.empty(size, dtype=torch.uint8, device=device)
    swap({}, incoming, group=group)
    values = [value]
    for rank in sorted(incoming):
        values.append(pickle.loads(zlib.decompress(incoming.pop(rank).cpu().numpy().data)))
    return values
