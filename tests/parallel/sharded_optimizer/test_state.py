"""State is saved and loaded at any layout, by ckpt; at the same one by ``state_dict``."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from megablocks_core import ckpt
from megablocks_core.groups import LOCAL, Group, Mesh, gather_whole
from megablocks_core.parallel import ShardedOptimizer
from megablocks_core.testing import ranks
from megablocks_core.train import Scheduled, constant_schedule, decays, parameter_groups
from tests.parallel.fsdp_models import Net
from tests.parallel.sharded_training import BUCKET_BYTES, built, train

SGD = {"momentum": 0.9, "dampening": 0.5}


def _world():
    return Group.of(dist.group.WORLD)


def _made(net, optimizer_class, *, group, dtype=torch.float64, **options):
    hyper = SGD if optimizer_class is torch.optim.SGD else {}
    return ShardedOptimizer(
        net,
        optimizer_class,
        group=group,
        expert_group=group,
        bucket_bytes=BUCKET_BYTES,
        lr=0.01,
        **options,
        **hyper,
    )


@ranks(4)
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD])
def test_saved_at_dp_2_zero_1_it_goes_on_at_other_layouts(optimizer_class, tmp_path):
    """Every layout trains two steps of its own after a checkpoint of two."""
    mesh = Mesh(dp=2, tp=2)
    dp, tp = mesh.group("dp"), mesh.group("tp")
    twin, net = built(tp=tp)
    optimizer = _made(net, optimizer_class, group=dp)
    train(net, optimizer, [dp.rank], size=dp.size, steps=range(2))
    state = {"model": net, "optimizer": optimizer}
    ckpt.save(tmp_path / "two", state, group=_world())
    train(net, optimizer, [dp.rank], size=dp.size, steps=range(2, 4))
    expected = gather_whole(net)

    for group, cut, options in (
        (mesh.group("dp", "tp"), LOCAL, {"zero": 2}),
        (LOCAL, LOCAL, {}),
        (dp, tp, {"zero": 2, "offload": True}),
    ):
        net = Net(cut).double()
        optimizer = _made(net, optimizer_class, group=group, **options)
        ckpt.load(tmp_path / "two", {"model": net, "optimizer": optimizer}, group=_world())
        if group.size == 4:  # the tokens of two ranks, over four
            here, size = [group.rank // 2], 2
        else:
            here, size = ([dp.rank] if group.size == 2 else [0, 1]), 2
        train(net, optimizer, here, size=size, steps=range(2, 4))
        for name, tensor in gather_whole(net).items():
            assert_close(tensor, expected[name], rtol=0, atol=1e-10, msg=name)


@ranks(2)
def test_a_checkpoint_before_the_first_step_starts_nothing(tmp_path):
    group = _world()
    for optimizer_class in (torch.optim.SGD, torch.optim.Adagrad):
        path = tmp_path / optimizer_class.__name__
        _, net = built()
        optimizer = _made(net, optimizer_class, group=group)
        ckpt.save(path, {"model": net, "optimizer": optimizer}, group=group)
        train(net, optimizer, [group.rank], size=2, steps=range(3))
        _, again = built()
        other = _made(again, optimizer_class, group=group)
        train(again, other, [group.rank], size=2, steps=range(1))
        ckpt.load(path, {"model": again, "optimizer": other}, group=group)
        train(again, other, [group.rank], size=2, steps=range(3))
        for mine, theirs in zip(again.parameters(), net.parameters(), strict=True):
            assert torch.equal(mine, theirs)


@ranks(2)
@pytest.mark.parametrize("options", [{}, {"offload": True}], ids=["", "offload"])
def test_masters_go_with_a_checkpoint_to_the_bit(options, tmp_path):
    group = _world()
    _, net = built(dtype=torch.bfloat16)
    optimizer = _made(net, torch.optim.AdamW, group=group, **options)
    train(net, optimizer, [group.rank], size=2, steps=range(2))
    ckpt.save(tmp_path / "two", {"model": net, "optimizer": optimizer}, group=group)
    saved = copy.deepcopy(optimizer.state_dict())
    weights = copy.deepcopy(net.state_dict())
    train(net, optimizer, [group.rank], size=2, steps=range(2, 4))
    for by_ckpt in (True, False):
        _, again = built(dtype=torch.bfloat16)
        other = _made(again, torch.optim.AdamW, group=group, **options)
        if by_ckpt:
            ckpt.load(tmp_path / "two", {"model": again, "optimizer": other}, group=group)
        else:
            again.load_state_dict(weights)
            other.load_state_dict(saved)
        train(again, other, [group.rank], size=2, steps=range(2, 4))
        for mine, theirs in zip(again.parameters(), net.parameters(), strict=True):
            assert torch.equal(mine, theirs)


@ranks(2)
def test_a_state_dict_of_another_layout_is_refused():
    group = _world()
    _, net = built()
    optimizer = _made(net, torch.optim.AdamW, group=group)
    saved = optimizer.state_dict()
    assert set(saved) == {"state", "param_groups", "ranges", "steps"}
    _, other = built()
    alone = _made(other, torch.optim.AdamW, group=LOCAL)
    with pytest.raises(ValueError, match="same layout"):
        alone.load_state_dict(saved)
    with pytest.raises(ValueError, match="parameter groups"):
        optimizer.load_state_dict(saved | {"param_groups": []})
    _, third = built()
    with pytest.raises(ValueError, match="state_dict of parameter"):
        _made(third, torch.optim.SGD, group=group).load_state_dict(saved)
    with pytest.raises(ValueError, match="param_group must be given when"):
        optimizer.add_param_group({"params": []})


@ranks(1, 2)
def test_rules_and_schedules_know_logical_parameters():
    group = _world()
    _, net = built()
    groups = parameter_groups(net, {"lr": 0.01, "weight_decay": 0.1})
    ranks_of = {"group": group, "expert_group": group}
    optimizer = ShardedOptimizer(net, torch.optim.AdamW, groups=groups, **ranks_of)
    for mine, theirs in zip(optimizer.param_groups, groups, strict=True):
        assert mine["param_names"] == theirs["param_names"]
        assert all(
            decays(name, tuple(net.get_parameter(name).shape)) == (mine["weight_decay"] == 0.1)
            for name in mine["param_names"]
        )
    rate = Scheduled(optimizer, constant_schedule(warmup=10))
    rate.set(5)
    assert optimizer.param_groups[0]["lr"] == 0.005
    train(net, optimizer, [group.rank], size=group.size, steps=range(1))
    with pytest.raises(ValueError, match="stepped or loaded"):
        Scheduled(optimizer, constant_schedule(warmup=10))


@ranks(2)
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("lr", (0.1, 0.2)),
        ("lr", (torch.tensor(0.1), torch.tensor(0.2))),
        ("betas", ((0.9, 0.95), (0.9, 0.99))),
        ("weight_decay", (0.0, 0.1)),
    ],
)
def test_hyperparameters_that_differ_between_ranks_are_refused(name, values):
    group = Group.of(dist.group.WORLD)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    with pytest.raises(ValueError, match=rf"{name} of parameter group 0 must be .*: it is .* here"):
        ShardedOptimizer(model, torch.optim.AdamW, group=group, **{name: values[group.rank]})
    ShardedOptimizer(model, torch.optim.AdamW, group=group, **{name: values[0]})
