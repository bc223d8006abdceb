"""A group copies to itself, pickles as its ranks, and needs nothing when it is of one."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist

from megablocks_core.groups import LOCAL, Group, bind
from megablocks_core.parallel import ColumnParallelLinear
from megablocks_core.testing import ranks


def test_f_215_alone_everything_works_without_a_process_group():
    """One process without initialisation: collectives are identities (P, confirmed)."""
    assert (LOCAL.size, LOCAL.rank, LOCAL.ranks, LOCAL.pg, LOCAL.name) == (1, 0, (0,), None, "")
    x = torch.arange(3)
    assert torch.equal(LOCAL.all_reduce(x), x) and LOCAL.all_reduce(x) is not x
    assert torch.equal(LOCAL.broadcast(x), x)
    assert [row.tolist() for row in LOCAL.all_gather(x)] == [[0, 1, 2]]
    assert LOCAL.all_gather_object("a") == ["a"] and LOCAL.broadcast_object("a") == "a"
    LOCAL.barrier()


@ranks(1, 2, 4)
def test_words_and_tensors_reach_every_rank_in_order():
    group = Group.of(dist.group.WORLD)
    me, size = group.rank, group.size
    assert group.all_gather_object({"rank": me}) == [{"rank": r} for r in range(size)]
    assert group.broadcast_object(f"from {me}", source=size - 1) == f"from {size - 1}"
    assert group.broadcast(torch.tensor([me]), source=size - 1).item() == size - 1
    assert group.all_reduce(torch.tensor([me]), "max").item() == size - 1
    gathered = group.all_gather(torch.full((me, 2), float(me)))
    assert [tuple(part.shape) for part in gathered] == [(r, 2) for r in range(size)]
    assert [part.item() for part in group.all_gather(torch.tensor(me))] == list(range(size))
    group.barrier()


@ranks(1, 2)
def test_a_group_of_one_rank_is_local():
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    assert Group.of(groups[dist.get_rank()]) is LOCAL
    assert (Group.of(dist.group.WORLD) is LOCAL) == (dist.get_world_size() == 1)


@ranks(2)
def test_copies_share_the_group_and_pickles_are_bound_again():
    group = Group.of(dist.group.WORLD)
    assert copy.copy(group) is group and copy.deepcopy([group])[0] is group
    assert pickle.loads(pickle.dumps(LOCAL)) is LOCAL

    layer = ColumnParallelLinear(4, 8, group=group)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.group.ranks == (0, 1) and loaded.group.rank == group.rank
    x = torch.ones(2, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"group of ranks \[0, 1\] has no process group"):
        loaded(x).sum().backward()
    with pytest.raises(ValueError, match=r"must include the ranks \[0, 1\]"):
        bind(loaded, LOCAL)
    bind(loaded, group)
    assert torch.equal(loaded(x), layer(x))
    loaded(x).sum().backward()


def test_without_a_world_there_is_no_group_of_it():
    with pytest.raises(ValueError, match="call init_process_group first"):
        Group.of(None)


def test_a_group_binds_to_equal_ranks_only():
    with pytest.raises(ValueError, match=r"\[0, 2\] must have the ranks \[0, 1\]"):
        Group((0, 1)).bind(Group((0, 2)))


@ranks(1, 2)
def test_a_group_is_found_by_its_name():
    group = Group.of(dist.group.WORLD)
    found = Group.named(group.name)
    assert (found.ranks, found.rank, found.pg) == (group.ranks, group.rank, group.pg)
    assert Group.named("") is LOCAL
