"""A check that ranks which should hold the same parameters do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn

from megablocks_core.groups import Group, Specs
from megablocks_core.parallel.wrapping.agreement import compare_words

# Elements that are widened at a time.
_BLOCK = 1 << 20
_COMPARED = ("name", "shape", "dtype", "requires_grad", "sum of bits")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def check_replicas(
    named: Sequence[tuple[str, nn.Parameter, Specs]],
    *,
    group: Group,
    expert_group: Group,
    values: bool = True,
    agreed: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Compare parameters with those of the other ranks: names, shapes, dtypes, and values.

    Of the values a sum over their bits is compared, which finds other seeds and stale
    weights. Dense parameters are compared over ``group`` and experts over ``expert_group``.
    Sends a gather of words over each. Those on ``meta`` have no values. ``agreed`` has what else
    must be equal, by name.

    Raises:
        ValueError: On all ranks; it names the first parameter, or other thing, that differs.
    """
    for expert, over in ((False, group), (True, expert_group)):
        if over.size == 1:
            continue
        mine = [
            (name, str(tuple(x.shape)), str(x.dtype), x.requires_grad, _sum(x) if values else 0)
            for name, x, specs in named
            if specs.expert == expert
        ]
        found = over.all_gather_object((mine, dict(agreed)))
        for rank, (theirs, others) in zip(over.ranks, found, strict=True):
            _compare(mine, theirs, rank)
            compare_words(agreed, others, rank)


def _compare(mine: list[tuple], theirs: list[tuple], rank: int) -> None:
    for one, other in zip(mine, theirs, strict=False):
        for what, here, there in zip(_COMPARED, one, other, strict=True):
            if here != there:
                raise ValueError(
                    f"parameter {one[0]!r} must be the same on all ranks: its {what} is {here} "
                    f"here and {there} on rank {rank}"
                )
    if len(mine) != len(theirs):
        raise ValueError(
            f"module must have the same parameters on all ranks: {len(mine)} here and "
            f"{len(theirs)} on rank {rank}"
        )


def _sum(parameter: Tensor) -> int:
    """Sum over the bits, read as integers."""
    if parameter.is_meta or parameter.numel() == 0:
        return 0
    flat = parameter.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    bits = flat.view(_INTEGERS[flat.dtype.itemsize])
    return int(torch.stack([part.sum(dtype=torch.int64) for part in bits.split(_BLOCK)]).sum())
