"""Numbers of parts of a model combined to those of the whole, each group asked once."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megablocks_core.groups import LOCAL, Group


def total_over_cuts(
    parts: Iterable[tuple[tuple[Group, ...], Tensor | None]],
    zero: Tensor,
    pp: Group = LOCAL,
    *,
    op: str,
) -> Tensor:
    """The number of the whole model: each part is combined over the groups that cut it.

    Sends one all-reduce of a few numbers over each group that cuts any part, and one over
    ``pp``. Groups of equal ranks are asked as one.

    Args:
        parts: The groups that cut a parameter, and a scalar from what counts on this rank, or
            ``None``: the same parameters in one order on every rank of a group.
        zero: Nothing: a scalar of the dtype and on the device of the result.
        pp: Ranks that hold other parameters.
        op: "sum" or "max". NaN on one rank is NaN on all, also in a maximum.
    """
    by_ranks: dict[tuple[int, ...], Group] = {}
    found: dict[frozenset[tuple[int, ...]], list[Tensor]] = {}
    for groups, number in parts:
        keys = {tuple(sorted(group.ranks)): group for group in groups if group.size > 1}
        by_ranks |= {key: group for key, group in keys.items() if key not in by_ranks}
        numbers = found.setdefault(frozenset(keys), [zero])
        if number is not None:
            numbers.append(number.to(zero.device))
    totals = {keys: _combined(numbers, op) for keys, numbers in found.items()}
    for key, group in by_ranks.items():
        cut = [keys for keys in totals if key in keys]
        heard = _heard(torch.stack([totals[keys] for keys in cut]), op, group)
        totals.update(zip(cut, heard, strict=True))
    return _heard(_combined([zero, *totals.values()], op).view(1), op, pp)[0]


def _heard(numbers: Tensor, op: str, group: Group) -> Tensor:
    if op == "sum" or not numbers.is_floating_point():
        return group.all_reduce(numbers, op)
    top, unknown = group.all_reduce(
        torch.stack(
            [numbers.nan_to_num(nan=0.0, posinf=torch.inf), numbers.isnan().to(numbers.dtype)]
        ),
        op,
    )
    return torch.where(unknown > 0, torch.nan, top)


def _combined(numbers: list[Tensor], op: str) -> Tensor:
    stacked = torch.stack(numbers)
    return stacked.max() if op == "max" else stacked.sum()
