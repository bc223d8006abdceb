"""Rows that came from several ranks, sorted by source and expert, in the order of experts.

Rows with one source and one expert are a run. To order rows by expert is to move whole runs, so
their lengths say it all and nothing is sorted.

Dimensions: q ranks of an expert's features, p ranks of experts, e experts here, M rows.
"""

import torch
from torch import Tensor

from megablocks_core.layers.moe.dispatch.assignment import Order


def regroup(counts_qpe: Tensor, num_rows: int, *, capacity: int | None = None) -> Order:
    """The order by expert, then by rank of experts, of features, and token; over M "tokens".

    Args:
        counts_qpe: Rows of each run, which lie one after another in this order [q p e].
        num_rows: M.
        capacity: Rows that a run takes whether it fills them or not; default those it has.
    """
    device = counts_qpe.device
    counts = counts_qpe.reshape(-1)
    runs = torch.arange(counts.shape[0], device=device).view(counts_qpe.shape)
    by_expert = runs.permute(2, 1, 0).contiguous()
    counts_epq = counts_qpe.permute(2, 1, 0).contiguous()
    if capacity is None:
        starts, targets_epq = _before(counts), _before(counts_epq.reshape(-1))
    else:
        starts = runs.reshape(-1) * capacity
        first = by_expert.shape[1] * by_expert.shape[2] * capacity
        inside = _before(counts_epq.flatten(1))
        experts = torch.arange(by_expert.shape[0], device=device)
        targets_epq = (inside + first * experts.unsqueeze(1)).reshape(-1)
    targets = targets_epq.view(by_expert.shape).permute(2, 1, 0).reshape(-1)
    by_expert, counts_epq = by_expert.reshape(-1), counts_epq.reshape(-1)
    rows = _moved(targets_epq, counts_epq, starts[by_expert], num_rows)
    places = _moved(starts, counts, targets, num_rows)
    return Order(rows, rows, places.unsqueeze(1), counts_qpe.sum((0, 1)))


def _before(counts: Tensor) -> Tensor:
    """Sum of those before each, along the last dimension."""
    return counts.cumsum(-1) - counts


def _moved(starts: Tensor, counts: Tensor, targets: Tensor, length: int) -> Tensor:
    """Where each of ``length`` positions goes, if runs move from ``starts`` to ``targets``.

    -1 for positions that no run fills.
    """
    positions = torch.arange(length, device=starts.device)
    run = torch.searchsorted(starts, positions, right=True) - 1
    offset = positions - starts[run]
    return torch.where(offset < counts[run], targets[run] + offset, -1)
