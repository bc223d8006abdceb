"""Cells that several ranks hold are compared, and what differs is named."""

import numpy as np
import torch

from megablocks_core.ckpt.plans.outlines import Outline, holdings, pack
from megablocks_core.ckpt.plans.replicas import Replicas

ROWS = [(slice(0, 2),), (slice(2, 4),)]


def _outlines(rank):
    """``a`` is cut over pairs of ranks, ``b`` on rank 0 alone, ``c`` whole and in halves."""
    held = [Outline("m/a", torch.float32, (4,), [ROWS[rank % 2]])]
    if rank == 0:
        held.append(Outline("m/b", torch.float32, (), [()]))
    if rank < 2:
        held.append(Outline("m/c", torch.float32, (4,), [(slice(0, 4),)] if rank else ROWS))
    return held


def test_each_rank_hashes_what_others_hold_too():
    replicas = Replicas(holdings([pack(_outlines(rank)) for rank in range(4)]))
    a = [[("m/a", row)] for row in ROWS]
    c = [("m/c", row) for row in ROWS]
    assert [replicas.of(rank) for rank in range(4)] == [a[0] + c, a[1] + c, a[0], a[1]]


def test_what_differs_is_named_with_two_ranks():
    replicas = Replicas(holdings([pack(_outlines(rank)) for rank in range(4)]))
    equal = [[1, 3, 4], [2, 3, 4], [1], [2]]
    assert replicas.different([np.array(one, dtype=np.uint64) for one in equal]) == []
    for hashes, expected in (
        ([[1, 3, 4], [2, 3, 4], [1], [7]], [("m/a", 1, 3)]),
        ([[1, 3, 4], [2, 3, 5], [9], [7]], [("m/a", 0, 2), ("m/c", 0, 1)]),
    ):
        found = replicas.different([np.array(one, dtype=np.uint64) for one in hashes])
        assert found == expected


def test_nothing_is_held_twice():
    replicas = Replicas(holdings([pack(_outlines(0)[:1]), pack(_outlines(1)[:1])]))
    assert replicas.of(0) == []
    assert replicas.different([np.empty(0, dtype=np.uint64)] * 2) == []
