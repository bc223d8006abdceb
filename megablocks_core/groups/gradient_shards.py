"""Gradients of which each rank keeps a range only, and where they are found.

A sharded optimizer sums gradients over its ranks and leaves each of them a range of the sum.
What it keeps hangs on the parameter, so that norms, counts and statistics see it without knowing
the optimizer. In ``parameter.grad`` something stands in that refuses to be computed with, so that
code which does not know of ranges fails instead of finding no gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

from torch import Tensor

from megablocks_core.groups.group import Group, check_group

_ATTRIBUTE = "_gradient_shard"


class ShardedGradient(Tensor):
    """Stands in ``parameter.grad`` for a gradient that is kept elsewhere; it takes no memory.

    Whoever sets ``parameter.grad`` to ``None`` drops the gradient.

    Raises:
        RuntimeError: It is computed with.
    """

    @staticmethod
    def __new__(cls, parameter: Tensor) -> ShardedGradient:
        """Of the parameter's shape."""
        return Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls,
            parameter.shape,
            strides=parameter.stride(),
            dtype=parameter.grad_dtype or parameter.dtype,
            device=parameter.device,
        )

    @classmethod
    def __torch_dispatch__(cls, *unused: Any) -> NoReturn:
        """Refuse any operation."""
        raise RuntimeError(
            "a gradient of which ranks keep ranges must not be read or changed in .grad: use "
            "clip_grad_norm_, count_zeros and all_finite of megablocks_core.parallel, and the "
            "optimizer's zero_grad()"
        )

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"ShardedGradient(shape={tuple(self.shape)}, dtype={self.dtype})"


def show_sharded(parameter: Tensor) -> None:
    """Let a stand-in be ``parameter.grad``, unless there is a gradient."""
    if parameter.grad is None:
        parameter.grad = ShardedGradient(parameter)


def hide_sharded(parameter: Tensor) -> None:
    """Take the stand-in away, if it is there."""
    if isinstance(parameter.grad, ShardedGradient):
        parameter.grad = None


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
    """Hang ``shard`` on ``parameter``, or take the one there away, and what stands in for it.

    Deep copies and pickles of the parameter do not have it.

    Raises:
        ValueError: Its tensor is not one-dimensional, or is no range of the parameter.
    """
    if shard is None:
        if vars(parameter).pop(_ATTRIBUTE, None) is not None:
            hide_sharded(parameter)
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
    show_sharded(parameter)


def gradient_shard(parameter: Tensor) -> GradientShard | None:
    """The shard that hangs on ``parameter``, if any, and if ``.grad`` was not dropped."""
    holder = vars(parameter).get(_ATTRIBUTE)
    return None if holder is None or parameter.grad is None else holder.shard


class _Holder:
    """Holds a shard; copied or pickled with its parameter, it is empty."""

    __slots__ = ("shard",)

    def __init__(self, shard: GradientShard | None = None) -> None:
        self.shard = shard

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Holder, ())
