"""On the delayed back end results are gloo's, and reading or writing too early shows."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.tensor.debug import CommDebugMode

from megablocks_core.groups import Mesh, all_to_all
from megablocks_core.groups.messages import (
    finish_all_gather,
    finish_reduce_scatter,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    wait,
)
from megablocks_core.testing import ranks


@ranks(2, 4, backend="delayed")
def test_functional_collectives_have_the_right_results():
    group = Mesh(tp=dist.get_world_size()).group("tp")
    x = torch.arange(4.0) + group.rank
    flying = start_all_reduce(x, group=group)
    assert flying.isnan().all()
    assert wait(flying).equal(torch.arange(4.0) * group.size + sum(range(group.size)))

    sizes = [1] * group.size
    flying = start_all_gather(x[:1], dim=0, group=group, sizes=sizes)
    assert flying.isnan().all()
    assert finish_all_gather(flying, dim=0, sizes=sizes).equal(torch.arange(1.0 * group.size))

    flying = start_reduce_scatter(torch.ones(group.size), dim=0, group=group, sizes=sizes)
    assert finish_reduce_scatter(flying, dim=0, group=group, sizes=sizes) == group.size

    send = [int(rank == 0) for rank in range(group.size)]  # all rows go to rank 0
    receive = [int(group.rank == 0)] * group.size
    rows = all_to_all(torch.full((1, 2), group.rank), send=send, receive=receive, group=group)
    assert rows[:, 0].tolist() == (list(range(group.size)) if group.rank == 0 else [])


@ranks(2, backend="delayed")
def test_plain_collectives_and_words_have_the_right_results():
    group = Mesh(tp=2).group("tp")
    assert group.all_gather_object({"rank": group.rank}) == [{"rank": 0}, {"rank": 1}]
    assert group.broadcast_object(group.rank, source=1) == 1
    assert group.broadcast(torch.tensor(group.rank), source=1) == 1
    group.barrier()
    rows = [torch.full((group.rank + 1,), float(group.rank))] * 2
    assert [len(part) for part in group.all_gather(rows[0])] == [1, 2]

    whole, part = torch.empty(4), torch.empty(2)
    dist.all_gather_into_tensor(whole, torch.full((2,), 1.0 + group.rank), group=group.pg)
    assert whole.tolist() == [1, 1, 2, 2]
    dist.reduce_scatter_tensor(part, whole, group=group.pg)
    assert part.tolist() == [[2, 2], [4, 4]][group.rank]
    if group.rank == 0:
        dist.send(torch.ones(3), dst=1)
    else:
        heard = torch.empty(3)
        dist.recv(heard, src=0)
        assert heard.sum() == 3


@ranks(2, backend="delayed")
def test_messages_in_inference_mode_have_the_right_results():
    with torch.inference_mode():
        own, gathered = torch.full((2,), 1.0 + dist.get_rank()), torch.empty(4)
        work = dist.all_gather_into_tensor(gathered, own, async_op=True)
        assert gathered.isnan().all()
        work.wait()
        dist.all_reduce(own)
    assert gathered.tolist() == [1, 1, 2, 2] and own.tolist() == [3, 3]
    assert gathered.is_inference() and own.is_inference()


@ranks(2, backend="delayed")
def test_an_input_that_is_overwritten_too_early_is_sent_as_it_is_then():
    x = torch.ones(2)
    whole = torch.empty(4)
    work = dist.all_gather_into_tensor(whole, x, async_op=True)
    assert work
    x.fill_(7)
    work.wait()
    assert whole.tolist() == [7] * 4


@ranks(2, backend="delayed")
def test_an_input_that_lies_in_the_output_is_sent():
    group = Mesh(tp=2).group("tp")
    whole = torch.full((4,), 1.0 + group.rank)
    own = whole.chunk(2)[group.rank]
    dist.all_gather_into_tensor(whole, own, group=group.pg)
    assert whole.tolist() == [1, 1, 2, 2]


@ranks(2, backend="delayed")
def test_an_output_that_is_read_too_early_is_nan():
    x = torch.ones(2)
    work = dist.all_reduce(x, async_op=True)
    assert work
    early = x.clone()
    work.wait()
    assert early.isnan().all()
    assert x.tolist() == [2, 2]


@ranks(2, backend="delayed")
def test_a_message_that_cannot_be_sent_raises_when_waited_for():
    work = dist.distributed_c10d._get_default_group().allgather([[torch.ones(2)]], [torch.ones(2)])
    with pytest.raises(RuntimeError):
        work.wait()


@ranks(2, backend="delayed")
def test_messages_are_counted_as_gloos_are():
    world = dist.distributed_c10d._get_default_group()
    whole, part = torch.ones(4), torch.ones(2)
    with CommDebugMode() as traffic:
        dist.all_reduce(part)
        dist.all_gather_into_tensor(whole, part)
        dist.reduce_scatter_tensor(part, whole)
        dist.all_to_all_single(whole, whole.clone())
        dist.broadcast(whole, src=1)
        funcol.all_reduce(part, "sum", world).sum()
    counts = {str(op).split(".")[-1]: n for op, n in traffic.get_comm_counts().items()}
    assert counts == {
        "allreduce_": 1,
        "_allgather_base_": 1,
        "_reduce_scatter_base_": 1,
        "alltoall_base_": 1,
        "broadcast_": 1,
        "all_reduce": 1,
    }
    assert whole.tolist() == [2.0] * 4 and part.tolist() == [4.0] * 2
