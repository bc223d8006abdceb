"""A group copies to itself, pickles as its ranks, and needs nothing when it is of one."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megablocks_core.groups import (
    LOCAL,
    Group,
    ShardSpec,
    all_gather_to,
    all_to_all,
    bind,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter_to,
    scatter_to,
    split_evenly,
    together,
)
from megablocks_core.parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    TeacherHead,
    VocabParallelEmbedding,
    clip_grad_norm_,
    linear_cross_entropy,
    linear_kl,
    reduce_gradients,
    tensor_parallelize,
    vocab_parallel_cross_entropy,
    vocab_parallel_kl,
)
from megablocks_core.testing import ranks
from megablocks_core.train import (
    FiniteGuard,
    Metrics,
    Progress,
    RunFolder,
    SpikeGuard,
    StepTimer,
    StopAfter,
    evaluate,
    watch,
)


def _together(group):
    with together("a task", group=group):
        pass


_X, _INDEX = torch.ones(4, 4), torch.zeros(4, dtype=torch.int64)
_USES = {
    "copy_to": lambda group: copy_to(_X, group=group),
    "reduce_from": lambda group: reduce_from(_X, group=group),
    "gather_from": lambda group: gather_from(_X, dim=0, group=group),
    "all_gather_to": lambda group: all_gather_to(_X, dim=0, group=group),
    "scatter_to": lambda group: scatter_to(_X, dim=0, group=group),
    "reduce_scatter_to": lambda group: reduce_scatter_to(_X, dim=0, group=group),
    "all_to_all": lambda group: all_to_all(_X, send=[4], receive=[4], group=group),
    "bind": lambda group: bind(nn.Linear(4, 4), group),
    "ShardSpec": lambda group: ShardSpec(0, group),
    "split_evenly": lambda group: split_evenly(4, group=group, name="length"),
    "together": _together,
    "ColumnParallelLinear": lambda group: ColumnParallelLinear(4, 4, group=group),
    "RowParallelLinear": lambda group: RowParallelLinear(4, 4, group=group),
    "VocabParallelEmbedding": lambda group: VocabParallelEmbedding(4, 4, group=group),
    "tensor_parallelize": lambda group: tensor_parallelize(nn.Linear(4, 4), {}, group=group),
    "vocab_parallel_cross_entropy": lambda group: vocab_parallel_cross_entropy(
        _X, _INDEX, group=group
    ),
    "linear_cross_entropy": lambda group: linear_cross_entropy(_X, _X, _INDEX, group=group),
    "vocab_parallel_kl": lambda group: vocab_parallel_kl(_X, _X, group=group),
    "linear_kl": lambda group: linear_kl(_X, _X, TeacherHead(_X, _X), group=group),
    "clip_grad_norm_": lambda group: clip_grad_norm_(nn.Linear(4, 4), 1.0, pp=group),
    "reduce_gradients": lambda group: reduce_gradients(nn.Linear(4, 4), group=group),
    "reduce_gradients of experts": lambda group: reduce_gradients(
        nn.Linear(4, 4), group=LOCAL, expert_group=group
    ),
    "evaluate": lambda group: evaluate(nn.Linear(4, 4), [_X], group=group),
    "watch": lambda group: watch(nn.Linear(4, 4), group=group),
    "Metrics": lambda group: Metrics("loss", group=group),
    "FiniteGuard": lambda group: FiniteGuard(group=group),
    "SpikeGuard": lambda group: SpikeGuard(group=group),
    "StepTimer": lambda group: StepTimer(group=group),
    "StopAfter": lambda group: StopAfter(group=group),
    "Progress": lambda group: Progress(3, group=group),
    "RunFolder": lambda group: RunFolder("nowhere", record={}, group=group),
}


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


@pytest.mark.parametrize("wrong", ["tp", None, 0, ["tp"]])
@pytest.mark.parametrize("use", _USES.values(), ids=_USES)
def test_a_name_or_none_in_the_place_of_a_group_is_refused(use, wrong):
    with pytest.raises(ValueError, match=r"(group|pp)=.* must be a Group: LOCAL, or such as mesh"):
        use(wrong)


@pytest.mark.parametrize("wrong", ["tp", None, 0])
def test_only_a_process_group_is_wrapped(wrong):
    with pytest.raises(ValueError, match=f"process_group={wrong!r} must be"):
        Group.of(wrong)
