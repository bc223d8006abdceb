"""Gradients of which each rank keeps a range only, and where they are found.

A sharded optimizer sums gradients over its ranks and leaves each of them a range of the sum;
``parameter.grad`` is then ``None``. What it keeps hangs on the parameter, so that norms, counts
and statistics see it without knowing the optimizer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from megablocks_core.groups.group import Group, check_group

_ATTRIBUTE = "_gradient_shard"


class GradientShard(NamedTuple):
    """This rank's range of a parameter's gradient.

    Attributes:
        tensor: Elements [start, start + length) of the gradient of this rank's parameter,
            flattened; empty where other ranks hold all of it.
        start: The first of them.
        group: The ranks that hold the whole together. Each of them has a shard, or none has.
    """

    tensor: Tensor
    start: int
    group: Group


def set_gradient_shard(parameter: Tensor, shard: GradientShard | None) -> None:
    """Hang ``shard`` on ``parameter``, or take the one there away.

    Deep copies and pickles of the parameter do not have it.

    Raises:
        ValueError: Its tensor is not one-dimensional, or is no range of the parameter.
    """
    if shard is None:
        vars(parameter).pop(_ATTRIBUTE, None)
        return
    tensor, start, group = shard
    check_group(group)
    if tensor.dim() != 1:
        raise ValueError(f"tensor of shape {tuple(tensor.shape)} must have one dimension")
    if not 0 <= start <= start + len(tensor) <= parameter.numel():
        raise ValueError(
            f"start={start} and {len(tensor)} elements must be a range of a parameter of "
            f"{parameter.numel()} elements"
        )
    vars(parameter)[_ATTRIBUTE] = _Holder(shard)


def gradient_shard(parameter: Tensor) -> GradientShard | None:
    """The shard that hangs on ``parameter``, if any."""
    holder = vars(parameter).get(_ATTRIBUTE)
    return None if holder is None else holder.shard


class _Holder:
    """Holds a shard; copied or pickled with its parameter, it is empty."""

    __slots__ = ("shard",)

    def __init__(self, shard: GradientShard | None = None) -> None:
        self.shard = shard

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Holder, ())
