"""Messages arrive whole, from slices of any length, and change nothing that they take."""

import pytest
import torch
import torch.distributed as dist

from megablocks_core.groups import Group, chunk_slice
from megablocks_core.groups.messages import (
    all_gather,
    all_gather_lists,
    finish_reduce_scatter,
    learn_sizes,
    start_all_reduce,
    start_all_to_all,
    start_reduce_scatter,
    sum_flat,
    wait,
)
from megablocks_core.testing import ranks


def _whole(rows, dtype=torch.float64):
    return torch.arange(rows * 2, dtype=dtype).view(rows, 2)


@ranks(2, 4)
@pytest.mark.parametrize("rows", [8, 5, 2])
@pytest.mark.parametrize("dim", [0, 1])
def test_slices_are_gathered_and_sums_are_cut(rows, dim):
    """Two rows over four ranks: some hold none."""
    group = Group.of(dist.group.WORLD)
    parts = [chunk_slice(rows, group.size, rank) for rank in range(group.size)]
    sizes = [part.stop - part.start for part in parts]
    whole, own = _whole(rows), _whole(rows)[parts[group.rank]]
    if dim:
        whole, own = whole.t(), own.t()
    assert learn_sizes(own, dim=dim, group=group) == sizes
    assert torch.equal(all_gather(own, dim=dim, group=group, sizes=sizes), whole)
    assert torch.equal(torch.cat(all_gather_lists(own.movedim(dim, 0), group=group)), _whole(rows))
    flying = start_reduce_scatter(whole, dim=dim, group=group, sizes=sizes)
    got = finish_reduce_scatter(flying, dim=dim, group=group, sizes=sizes)
    assert torch.equal(got, group.size * own)
    assert torch.equal(wait(start_all_reduce(whole, group=group)), group.size * whole)


@ranks(2)
def test_rows_go_to_every_rank():
    group = Group.of(dist.group.WORLD)
    send = [[1, 2], [0, 3]][group.rank]
    receive = [[1, 0], [2, 3]][group.rank]
    rows = _whole(3) + 10 * group.rank
    flying = start_all_to_all(rows, receive=receive, send=send, group=group)
    first, second = _whole(3), _whole(3) + 10
    expected = [first[:1], torch.cat([first[1:], second])][group.rank]
    assert torch.equal(wait(flying), expected)


@ranks(2)
def test_sums_of_a_dtype_travel_together_and_come_back_in_their_own():
    group = Group.of(dist.group.WORLD)
    tensors = [torch.ones(2), torch.ones(3, 1, dtype=torch.bfloat16), torch.full((), 2.0)]
    before = [x.clone() for x in tensors]
    sums = sum_flat(tensors, group=group)
    for x, old, total in zip(tensors, before, sums, strict=True):
        assert torch.equal(x, old)
        assert torch.equal(total, 2 * x) and total.dtype == x.dtype
