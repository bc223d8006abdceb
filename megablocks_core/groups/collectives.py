"""Collectives with exact gradients (Megatron-LM, https://arxiv.org/abs/1909.08053, section 3).

Each is an adjoint pair for one loss that every rank of the group holds in full:

===================== ============== ===============================
collective            forward        backward
===================== ============== ===============================
``copy_to``           identity       all-reduce
``copy_slices_to``    identity       sum over the holders of a slice
``reduce_from``       all-reduce     identity
``gather_from``       all-gather     own slice
``all_gather_to``     all-gather     reduce-scatter
``scatter_to``        own slice      all-gather
``reduce_scatter_to`` reduce-scatter all-gather
``all_to_all``        all-to-all     the reverse
===================== ============== ===============================

Over a group of one all are the identity. They rest on torch's functional collectives, so
``torch.compile`` traces them, nothing the caller can see is changed in place, and a message
is in flight from its start until its result is waited for: no stream or environment
variable takes part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megablocks_core.groups.cuts import ShardSpec, chunk_slice
from megablocks_core.groups.group import Group, check_group
from megablocks_core.groups.messages import (
    all_gather,
    finish_reduce_scatter,
    learn_sizes,
    start_all_reduce,
    start_all_to_all,
    start_reduce_scatter,
    sum_flat,
    wait,
)


@overload
def copy_to(x: Tensor, /, *, group: Group, reduce_dtype: torch.dtype | None = None) -> Tensor: ...


@overload
def copy_to(
    *tensors: Tensor, group: Group, reduce_dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]: ...


def copy_to(
    *tensors: Tensor, group: Group, reduce_dtype: torch.dtype | None = None
) -> Tensor | tuple[Tensor, ...]:
    """Identity; backward all-reduces the gradients, in one message per dtype.

    The right one where a tensor equal on every rank enters work that each rank does on its
    own heads, features or tokens: the gradients there are parts of a sum.

    Args:
        *tensors: One tensor gives one back, several give a tuple.
        group: The ranks.
        reduce_dtype: Sum in this dtype; default that of each gradient, at least float32 for
            16-bit gradients of several tensors (weights).
    """
    check_group(group)
    if group.size == 1:
        return tensors[0] if len(tensors) == 1 else tensors
    if len(tensors) == 1 and reduce_dtype is None:
        return _CopyTo.apply(tensors[0], group)
    return _one_or_all(_CopyAllTo.apply(group, reduce_dtype, *tensors))


def copy_slices_to(*tensors: Tensor, specs: Sequence[ShardSpec]) -> tuple[Tensor, ...]:
    """Identity; backward sums the gradient of each slice over the neighbours that hold it.

    The right one for this rank's shares of weights of which some slices lie on several ranks
    (key and value heads fewer than ranks), each used there on its own heads. One message
    carries every slice that is held twice, and only those.

    Args:
        *tensors: This rank's shares.
        specs: The cut of each, over one group.
    """
    group = specs[0].group
    if group.size == 1 or not any(spec.has_copies for spec in specs):
        return tensors
    return _CopySlicesTo.apply(list(specs), *tensors)


def reduce_from(x: Tensor, *, group: Group) -> Tensor:
    """Sum over the group, on every rank; backward is the identity.

    The right one where each rank holds a part of a sum and all go on with the whole alike.
    """
    check_group(group)
    return x if group.size == 1 else _ReduceFrom.apply(x, group)


def gather_from(x: Tensor, *, dim: int, group: Group, sizes: Sequence[int] | None = None) -> Tensor:
    """Concatenate the ranks' slices along ``dim``; backward keeps this rank's slice.

    The right one where all ranks go on with the whole alike, such as whole logits for a loss
    that every rank computes.

    Args:
        x: This rank's slice; lengths along ``dim`` may differ and be 0.
        dim: The cut dimension.
        group: The ranks.
        sizes: Every rank's length along ``dim``. Without it the lengths are learned, which
            costs one small message more.

    Raises:
        ValueError: ``dim`` is not a dimension of ``x``; ``sizes`` has not one length a rank, or
            another one for this rank.
    """
    check_group(group)
    dim = _from_front(dim, x)
    if group.size == 1:
        return x
    return _GatherFrom.apply(x, dim, group, _sizes(x, dim, group, sizes))


def all_gather_to(
    x: Tensor, *, dim: int, group: Group, sizes: Sequence[int] | None = None
) -> Tensor:
    """Concatenate the ranks' slices along ``dim``; backward reduce-scatters.

    The right one where the whole enters work that each rank does on its own heads or
    features (a column-parallel product under sequence parallelism). Arguments as for
    ``gather_from``.
    """
    check_group(group)
    dim = _from_front(dim, x)
    if group.size == 1:
        return x
    return _AllGatherTo.apply(x, dim, group, _sizes(x, dim, group, sizes))


def scatter_to(x: Tensor, *, dim: int, group: Group, sizes: Sequence[int] | None = None) -> Tensor:
    """This rank's slice of ``x`` along ``dim``; backward all-gathers.

    The right one where ranks hold the whole alike and each goes on with its own tokens.

    Args:
        x: The whole, equal on every rank.
        dim: The dimension to cut.
        group: The ranks.
        sizes: Every rank's length along ``dim``; default the rule of ``torch.chunk``.

    Raises:
        ValueError: ``dim`` is not a dimension of ``x``; ``sizes`` has not one length a rank, or
            they do not add up.
    """
    check_group(group)
    dim = _from_front(dim, x)
    if group.size == 1:
        return x
    return _ScatterTo.apply(x, dim, group, _cut_sizes(x, dim, group, sizes))


def reduce_scatter_to(
    x: Tensor, *, dim: int, group: Group, sizes: Sequence[int] | None = None
) -> Tensor:
    """This rank's slice along ``dim`` of the sum over the group; backward all-gathers.

    The right one where each rank holds a part of a sum and goes on with its own tokens of it
    (a row-parallel product under sequence parallelism). Arguments as for ``scatter_to``.
    """
    check_group(group)
    dim = _from_front(dim, x)
    if group.size == 1:
        return x
    return _ReduceScatterTo.apply(x, dim, group, _cut_sizes(x, dim, group, sizes))


def all_to_all(x: Tensor, *, send: Sequence[int], receive: Sequence[int], group: Group) -> Tensor:
    """Send rows to every rank and receive theirs; backward is the reverse.

    The right one where rows move to the ranks that work on them, such as tokens to experts:
    each row's gradient comes back to where the row came from.

    Args:
        x: Rows for rank 0, then for rank 1, and so on [sum(send) ...].
        send: How many rows go to each rank; may be 0.
        receive: How many rows come from each rank; may be 0.
        group: The ranks.

    Returns:
        The received rows, in rank order [sum(receive) ...].

    Raises:
        ValueError: ``send`` or ``receive`` has not one number a rank, or ``send`` does not add
            up to the rows of ``x``.
    """
    check_splits(x, send, receive, group)
    if group.size == 1:
        return x
    return _AllToAll.apply(x, list(send), list(receive), group)


def check_splits(x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group) -> None:
    """Raise unless these rows can be sent so: what ``all_to_all`` says."""
    check_group(group)
    if x.dim() == 0:
        raise ValueError("x of shape () must have rows to send")
    for name, rows in (("send", send), ("receive", receive)):
        if len(rows) != group.size:
            raise ValueError(
                f"{name}={list(rows)} must have one number for each of {group.size} ranks"
            )
    if not torch.compiler.is_compiling() and sum(send) != x.shape[0]:
        raise ValueError(f"send={list(send)} must add up to the {x.shape[0]} rows of x")


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _ReduceFrom.apply(dy, ctx.group), None


class _CopyAllTo(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: Group, reduce_dtype: torch.dtype | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.reduce_dtype = group, reduce_dtype
        ctx.shapes = [(x.shape, x.dtype, x.device) for x in tensors]
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        # A gradient that this rank does not have is zero: every rank sends the same message.
        dense = [
            torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
            for grad, (shape, dtype, device) in zip(grads, ctx.shapes, strict=True)
        ]
        return (None, None, *sum_flat(dense, group=ctx.group, dtype=ctx.reduce_dtype))


class _CopySlicesTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, specs: list[ShardSpec], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.specs = specs
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        group = ctx.specs[0].group
        grads = tuple(grad.clone() for grad in grads)
        shared = [
            (grad.narrow(spec.dim, start, length), parts, group.rank * parts // group.size)
            for grad, spec in zip(grads, ctx.specs, strict=True)
            for start, length, parts in spec.shared(grad.shape[spec.dim])
        ]
        # Every rank puts its slice in the slice's place, so that one sum serves all neighbours.
        places = [piece.new_zeros(parts, *piece.shape) for piece, parts, _ in shared]
        for (piece, _, own), place in zip(shared, places, strict=True):
            place[own] = piece
        for (piece, _, own), total in zip(shared, sum_flat(places, group=group), strict=True):
            piece.copy_(total[own])
        return (None, *grads)


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return wait(start_all_reduce(x, group=group))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _CopyTo.apply(dy, ctx.group), None


class _GatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group, sizes: list[int]) -> Tensor:
        ctx.dim, ctx.group, ctx.sizes = dim, group, sizes
        return all_gather(x, dim=dim, group=group, sizes=sizes)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _ScatterTo.apply(dy, ctx.dim, ctx.group, ctx.sizes), None, None, None


class _ScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group, sizes: list[int]) -> Tensor:
        ctx.dim, ctx.group, ctx.sizes = dim, group, sizes
        start = sum(sizes[: group.rank])
        # A copy, so that the whole can be freed.
        return x.narrow(dim, start, sizes[group.rank]).clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _GatherFrom.apply(dy, ctx.dim, ctx.group, ctx.sizes), None, None, None


class _AllGatherTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group, sizes: list[int]) -> Tensor:
        ctx.dim, ctx.group, ctx.sizes = dim, group, sizes
        return all_gather(x, dim=dim, group=group, sizes=sizes)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _ReduceScatterTo.apply(dy, ctx.dim, ctx.group, ctx.sizes), None, None, None


class _ReduceScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group, sizes: list[int]) -> Tensor:
        ctx.dim, ctx.group, ctx.sizes = dim, group, sizes
        flying = start_reduce_scatter(x, dim=dim, group=group, sizes=sizes)
        return finish_reduce_scatter(flying, dim=dim, group=group, sizes=sizes)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _AllGatherTo.apply(dy, ctx.dim, ctx.group, ctx.sizes), None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return wait(start_all_to_all(x, receive=receive, send=send, group=group))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _AllToAll.apply(dy, ctx.receive, ctx.send, ctx.group), None, None, None


def _from_front(dim: int, x: Tensor) -> int:
    """``dim`` counted from the front."""
    if not hasattr(dim, "__index__") or not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim={dim!r} must be a dimension of x, whose shape is {tuple(x.shape)}")
    return dim % x.dim()


def _sizes(x: Tensor, dim: int, group: Group, sizes: Sequence[int] | None) -> list[int]:
    """The ranks' lengths along ``dim``, as given or learned."""
    if sizes is None:
        return learn_sizes(x, dim=dim, group=group)
    if len(sizes) != group.size or sizes[group.rank] != x.shape[dim]:
        raise ValueError(
            f"sizes={list(sizes)} must have one length for each of {group.size} ranks, and "
            f"{x.shape[dim]} for rank {group.rank}"
        )
    return list(sizes)


def _cut_sizes(x: Tensor, dim: int, group: Group, sizes: Sequence[int] | None) -> list[int]:
    """The lengths into which ``dim`` is cut, as given or by the rule of ``torch.chunk``."""
    length = x.shape[dim]
    if sizes is None:
        parts = (chunk_slice(length, group.size, rank) for rank in range(group.size))
        return [part.stop - part.start for part in parts]
    if len(sizes) != group.size or sum(sizes) != length:
        raise ValueError(
            f"sizes={list(sizes)} must have one length for each of {group.size} ranks and add "
            f"up to {length}"
        )
    return list(sizes)


def _one_or_all(tensors: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    return tensors[0] if len(tensors) == 1 else tensors
