"""The messages between ranks, outside autograd: start one, work, then wait for it.

They rest on torch's functional collectives: nothing the caller can see is changed in place, and a
message is in flight from its start until its result is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megablocks_core.groups import cpu_gather
from megablocks_core.groups.group import Group

_ops = torch.ops._c10d_functional


def start_all_reduce(x: Tensor, *, group: Group) -> Tensor:
    """Start to sum ``x`` over ``group``; hold the result and ``wait`` for it before use."""
    return _ops.all_reduce(x.contiguous(), "sum", group.name)


def start_all_gather(x: Tensor, *, dim: int, group: Group, sizes: Sequence[int]) -> Tensor:
    """Start to gather slices; ``finish_all_gather`` waits and puts them together."""
    longest = max(sizes)
    x = x.movedim(dim, 0)
    if x.shape[0] < longest:
        # Back ends want equal messages: shorter slices travel padded.
        x = torch.cat([x, x.new_zeros(longest - x.shape[0], *x.shape[1:])])
    return _start_gather(x.contiguous(), group)


def finish_all_gather(flying: Tensor, *, dim: int, sizes: Sequence[int]) -> Tensor:
    """Wait for ``start_all_gather`` and concatenate the slices along ``dim``."""
    longest = max(sizes)
    whole = wait(flying)
    if min(sizes) < longest:
        parts = whole.split(longest)
        whole = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
    return whole.movedim(0, dim)


def start_reduce_scatter(x: Tensor, *, dim: int, group: Group, sizes: Sequence[int]) -> Tensor:
    """Start to sum ``x`` over ``group`` and cut it; ``finish_reduce_scatter`` waits."""
    longest = max(sizes)
    x = x.movedim(dim, 0)
    if min(sizes) < longest:
        pads = [x.new_zeros(longest - size, *x.shape[1:]) for size in sizes]
        parts = x.split(list(sizes))
        x = torch.cat([piece for pair in zip(parts, pads, strict=True) for piece in pair])
    return _ops.reduce_scatter_tensor(x.contiguous(), "sum", group.size, group.name)


def finish_reduce_scatter(
    flying: Tensor, *, dim: int, group: Group, sizes: Sequence[int]
) -> Tensor:
    """Wait for ``start_reduce_scatter``: this rank's slice of the sum."""
    return wait(flying)[: sizes[group.rank]].movedim(0, dim)


def start_all_to_all(
    x: Tensor, *, receive: Sequence[int], send: Sequence[int], group: Group
) -> Tensor:
    """Start to send rows to every rank and to receive theirs."""
    return _ops.all_to_all_single(x.contiguous(), list(receive), list(send), group.name)


def wait(flying: Tensor) -> Tensor:
    """Wait until a started message has arrived."""
    return _ops.wait_tensor(flying)


def all_gather(x: Tensor, *, dim: int, group: Group, sizes: Sequence[int]) -> Tensor:
    """Every rank's slice, concatenated along ``dim``, when it has arrived."""
    flying = start_all_gather(x, dim=dim, group=group, sizes=sizes)
    return finish_all_gather(flying, dim=dim, sizes=sizes)


def all_gather_lists(x: Tensor, *, group: Group) -> list[Tensor]:
    """Every rank's ``x``, in rank order, outside autograd; lengths of dim 0 may differ."""
    if group.size == 1:
        return [x.clone()]
    if x.dim() == 0:
        return [row[0] for row in all_gather_lists(x.reshape(1), group=group)]
    sizes = learn_sizes(x, dim=0, group=group)
    return list(all_gather(x.detach(), dim=0, group=group, sizes=sizes).split(sizes))


def learn_sizes(x: Tensor, *, dim: int, group: Group) -> list[int]:
    """Every rank's length of ``x`` along ``dim``; one message of eight bytes a rank."""
    size = torch.tensor([x.shape[dim]], dtype=torch.int64, device=x.device)
    return wait(_start_gather(size, group)).tolist()


def sum_flat(
    tensors: Sequence[Tensor], *, group: Group, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Sum each tensor over ``group``, all of one dtype in one message, outside autograd.

    Args:
        tensors: The same shapes on every rank.
        group: The ranks.
        dtype: Sum in this dtype; default float32 for 16-bit tensors, else their own.
    """
    results: list[Tensor] = list(tensors)
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index, x in enumerate(tensors):
        by_dtype.setdefault(dtype or _wide(x.dtype), []).append(index)
    for wire, indices in by_dtype.items():
        flat = torch.cat([tensors[index].reshape(-1).to(wire) for index in indices])
        total = wait(start_all_reduce(flat, group=group))
        parts = total.split([tensors[index].numel() for index in indices])
        for index, part in zip(indices, parts, strict=True):
            results[index] = part.view(tensors[index].shape).to(tensors[index].dtype)
    return results


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _start_gather(x: Tensor, group: Group) -> Tensor:
    if x.device.type == "cpu":
        return cpu_gather.start(x, group=group)
    return _ops.all_gather_into_tensor(x, group.size, group.name)
