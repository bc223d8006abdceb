"""What one optimizer saved another of the same kind loads, however each cuts its state."""

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from megablocks_core import ckpt
from megablocks_core.ckpt.state.optimizers import Owner
from megablocks_core.ckpt.state.saved_groups import SavedGroups
from megablocks_core.groups import Group, Specs, gather_whole
from megablocks_core.parallel import DataParallel, ShardedOptimizer, fully_shard
from megablocks_core.testing import ranks
from megablocks_core.train import parameter_groups
from tests.parallel.sharded_training import built, train

MODES = ("whole", "zero 1", "zero 2", "zero 3")


def _groups(net):
    return parameter_groups(net, {"lr": 1e-2, "weight_decay": 0.1})


def _made(mode, optimizer_class, group):
    """A model, what is called to run it, and its optimizer, as a mode has them."""
    _, net = built()
    if mode in ("zero 1", "zero 2"):
        optimizer = ShardedOptimizer(
            net,
            optimizer_class,
            group=group,
            expert_group=group,
            zero=int(mode[-1]),
            bucket_bytes=500,
            groups=_groups(net),
        )
        return net, net, optimizer
    groups = {"group": group, "expert_group": group}
    called = DataParallel(net, **groups) if mode == "whole" else fully_shard(net, **groups)
    return net, called, optimizer_class(_groups(net))


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.Adagrad])
@ranks(2)
def test_every_mode_goes_on_from_what_another_saved(optimizer_class, tmp_path):
    """Steps, moments and hyperparameters; parameters that were never used have none of them."""
    group = Group.of(dist.group.WORLD)
    ends = []
    for saved in MODES:
        net, called, optimizer = _made(saved, optimizer_class, group)
        train(called, optimizer, [group.rank], size=2, steps=range(2))
        for one in optimizer.param_groups:
            one["lr"] *= 0.5
        ckpt.save(tmp_path / saved, {"model": net, "optimizer": optimizer}, group=group)
        train(called, optimizer, [group.rank], size=2, steps=range(2, 4))
        ends.append(gather_whole(net))
    for saved in MODES:
        for mode in MODES:
            net, called, optimizer = _made(mode, optimizer_class, group)
            state = {"model": net, "optimizer": optimizer}
            assert ckpt.load(tmp_path / saved, state, group=group) == ([], [])
            train(called, optimizer, [group.rank], size=2, steps=range(2, 4))
            ends.append(gather_whole(net))
    for end in ends[1:]:
        for name, tensor in end.items():
            assert_close(tensor, ends[0][name], rtol=0, atol=1e-10, msg=name)


@ranks(2)
def test_masters_are_taken_from_the_weights_where_none_were_saved(tmp_path):
    """And are left where they are by an optimizer that has none."""
    group = Group.of(dist.group.WORLD)
    _, net = built(dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(_groups(net))
    ckpt.save(tmp_path / "plain", {"model": net, "optimizer": optimizer}, group=group)
    _, other = built(dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    more = {"expert_group": group, "groups": _groups(other)}
    cut = ShardedOptimizer(other, torch.optim.AdamW, group=group, **more)
    ckpt.load(tmp_path / "plain", {"model": other, "optimizer": cut}, group=group)
    train(other, cut, [group.rank], size=2, steps=range(2))
    ckpt.save(tmp_path / "cut", {"model": other, "optimizer": cut}, group=group)
    state = {"model": net, "optimizer": optimizer}
    assert ckpt.load(tmp_path / "cut", state, group=group) == ([], [])
    assert all(set(one) == {"step", "exp_avg", "exp_avg_sq"} for one in optimizer.state.values())
    for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@ranks(2)
def test_a_field_that_was_not_saved_is_missing(tmp_path):
    group = Group.of(dist.group.WORLD)
    net, called, optimizer = _made("whole", torch.optim.AdamW, group)
    train(called, optimizer, [group.rank], size=2, steps=range(1))
    ckpt.save(tmp_path / "saved", {"model": net, "optimizer": optimizer}, group=group)
    _, other = built()
    more = {"amsgrad": True, "expert_group": group, "groups": _groups(other)}
    wider = ShardedOptimizer(other, torch.optim.AdamW, group=group, **more)
    with pytest.raises(ValueError, match="lacks .*max_exp_avg_sq"):
        ckpt.load(tmp_path / "saved", {"model": other, "optimizer": wider}, group=group)


def _owner(name):
    return Owner("model", name, torch.zeros(2), Specs())


def test_groups_are_matched_by_the_names_in_them():
    saved = [
        {"names": ["model/a"], "values": {"lr": 1}},
        {"names": ["model/b", "model/c"], "values": {"lr": 2}},
    ]
    found = SavedGroups("opt", saved, [[_owner("c"), _owner("b")], [_owner("a")], []])
    assert found.homes == [1, 0, None]
    assert [found.options(index) for index in range(3)] == [{"lr": 2}, {"lr": 1}, None]
    assert (found.missing, found.faults) == ([], [])
    assert found.asked == {"opt/model/a", "opt/model/b", "opt/model/c"}


def test_groups_that_do_not_match_are_named():
    saved = [{"names": ["model/a", "model/b"], "values": {}}, {"names": ["model/c"], "values": {}}]
    found = SavedGroups("opt", saved, [[_owner("a"), _owner("c")], [_owner("b")], [_owner("d")]])
    assert found.missing == ["opt/model/d"]
    assert found.faults == [
        "opt has one parameter group, 0, of what was saved as several: ['model/a', 'model/c']",
        "opt has two parameter groups, 0 and 1, of what was saved as one",
    ]
