"""Messages on memory that the caller owns: started now, waited for later, in place.

The other messages of this package change nothing that the caller can see. These write into the
caller's buffers, which saves a copy of all gradients. Between the start of a message and its
``wait`` its tensors must be neither read nor written. Shares are equal: what ranks cut is a
multiple of their number. Any number may be in flight; all ranks start them in one order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megablocks_core.groups.group import Group

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}

# Torch 2.13 renames them, and warns of the old names.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Handle:
    """A message under way. It holds the memory that the message reads and writes."""

    __slots__ = ("_finish", "_held", "_work")

    def __init__(self, work: Any, *held: Tensor, finish: Callable[[], Any] | None = None) -> None:
        self._work, self._held, self._finish = work, held, finish

    def has_arrived(self) -> bool:
        """Whether ``wait`` would return at once, as far as is known."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> None:
        """Return once the result may be read; a second call returns at once."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        self._held = ()


def start_all_reduce_(buffer: Tensor, *, group: Group, op: str = "sum") -> Handle:
    """Start to reduce ``buffer`` over ``group`` by ``op`` ("sum" or "max"), in place."""
    if group.size == 1:
        return Handle(None)
    return Handle(dist.all_reduce(buffer, _OPS[op], group=group.pg, async_op=True), buffer)


def start_reduce_scatter_(own: Tensor, whole: Tensor, *, group: Group) -> Handle:
    """Start to sum ``whole`` [L] over ``group``; ``own`` [L / size] gets this rank's part.

    ``own`` may be wider than ``whole``: then parts travel in the dtype of ``whole`` and are
    summed in that of ``own``. It may be this rank's part of ``whole`` itself, whose other
    parts keep their values. Sends (size - 1) / size of ``whole`` from each rank.
    """
    if group.size == 1:
        return Handle(None, own, whole, finish=lambda: own.copy_(whole))
    if whole.device.type != "cpu" and own.dtype == whole.dtype:
        work = _reduce_scatter(own, whole, group=group.pg, async_op=True)
        return Handle(work, own, whole)
    # Gloo's reduce-scatter is an all-reduce, which sends twice as much.
    parts = whole.new_empty(group.size, own.numel())
    work = dist.all_to_all_single(parts.view(-1), whole, group=group.pg, async_op=True)
    return Handle(work, own, whole, parts, finish=lambda: _sum(parts, own))


def start_all_gather_(whole: Tensor, own: Tensor, *, group: Group) -> Handle:
    """Start to gather every rank's ``own`` [L / size] into ``whole`` [L], in rank order.

    ``own`` may be this rank's part of ``whole``.
    """
    if group.size == 1:
        return Handle(None, own, whole, finish=lambda: whole.copy_(own))
    work = _all_gather(whole, own, group=group.pg, async_op=True)
    return Handle(work, own, whole)


def _sum(parts: Tensor, own: Tensor) -> None:
    """In rank order, so that the bits do not depend on who adds."""
    own.copy_(parts[0])
    for part in parts[1:]:
        own.add_(part)
