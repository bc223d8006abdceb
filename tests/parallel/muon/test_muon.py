"""Muon updates the logical matrices as one process does, whatever holds them."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

from megablocks_core.groups import (
    LOCAL,
    GradientShard,
    Group,
    Mesh,
    ShardSpec,
    logical_tensors,
    mark,
    set_gradient_shard,
    whole_tensor,
)
from megablocks_core.parallel.muon.muon import Muon
from megablocks_core.parallel.muon.newton_schulz import NewtonSchulz
from megablocks_core.testing import ranks
from tests.parallel import muon_layouts
from tests.traffic import Traffic

MODES = ["gather", "duplicated", "distributed"]
# A sum of another order differs by some units in the last place, which five steps carry on.
TOLERANCE = {"rtol": 0, "atol": 1e-11}


def _muon(model, **options):
    return Muon(model, **muon_layouts.MUON, adamw=muon_layouts.ADAMW, **options)


def _train(model, optimizer, steps, *, without=()):
    for step in steps:
        muon_layouts.set_gradients(model, step + 1, without=without)
        optimizer.step()


def _wholes(model):
    return {name: whole_tensor(t, specs) for name, t, specs in logical_tensors(model)}


def _check(model, expected):
    found = _wholes(model)
    assert found.keys() == expected.keys()
    for name, whole in expected.items():
        assert_close(found[name], whole, msg=lambda text, name=name: f"{name}: {text}", **TOLERANCE)


@pytest.mark.parametrize("mode", MODES)
def test_one_process_does_what_the_plain_twin_does(mode):
    model, groups = muon_layouts.alone()
    _train(model, _muon(model, mode=mode, **groups), range(5))
    _check(model, muon_layouts.plain_weights(5))


@ranks(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "layout",
    [muon_layouts.tp, muon_layouts.dealt, muon_layouts.fsdp],
    ids=lambda layout: layout.__name__,
)
def test_two_ranks_do_what_one_process_does(layout, mode):
    model, groups = layout()
    _train(model, _muon(model, mode=mode, **groups), range(5))
    _check(model, muon_layouts.plain_weights(5))


@ranks(4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "layout",
    [
        muon_layouts.tp_dealt,
        muon_layouts.etp,
        muon_layouts.fsdp,
        muon_layouts.fsdp_hybrid,
        muon_layouts.tp_fsdp,
    ],
    ids=lambda layout: layout.__name__,
)
def test_four_ranks_do_what_one_process_does(layout, mode):
    model, groups = layout()
    _train(model, _muon(model, mode=mode, **groups), range(5))
    _check(model, muon_layouts.plain_weights(5))


@ranks(2)
def test_a_packed_weight_with_copies_stays_equal_on_neighbours():
    model, _ = muon_layouts.tp()
    _train(model, _muon(model, mode="distributed"), range(2))
    rows = Group.of(dist.group.WORLD).all_gather(model.qkv.detach()[4:])
    assert torch.equal(*rows)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr", ["original", "match_rms_adamw"])
def test_an_uncut_matrix_is_that_of_torch(nesterov, adjust_lr):
    model = nn.Linear(8, 20, bias=False)
    twin = copy.deepcopy(model)
    options = {**muon_layouts.MUON, "nesterov": nesterov}
    ours = Muon(
        model, **options, adjust_lr=adjust_lr, newton_schulz=NewtonSchulz(dtype=torch.bfloat16)
    )
    theirs = torch.optim.Muon(twin.parameters(), **options, adjust_lr_fn=adjust_lr)
    for step in range(4):
        gradient = torch.randn(20, 8, generator=torch.Generator().manual_seed(step))
        for one, optimizer in ((model, ours), (twin, theirs)):
            one.weight.grad = gradient.clone()
            optimizer.step()
    assert_close(model.weight, twin.weight, rtol=0, atol=1e-6)


def test_the_scale_of_updates_is_that_of_the_matrix_not_of_the_packed_weight():
    model, _ = muon_layouts.alone()
    _train(model, _muon(model, adjust_lr="match_rms_adamw"), range(3))
    _check(model, muon_layouts.plain_weights(3, adjust=muon_layouts.mean_square))


@ranks(2)
@pytest.mark.parametrize("mode", MODES)
def test_unused_parameters_stay_and_those_used_on_one_rank_do_not_hang(mode):
    group = Group.of(dist.group.WORLD)
    model, _ = muon_layouts.tp()
    optimizer = _muon(model, mode=mode)
    _train(model, optimizer, range(2), without=("up", "norm", "experts_up"))
    _check(model, muon_layouts.plain_weights(2, without=("up", "norm", "experts_up")))
    muon_layouts.set_gradients(model, 3, without=("up",) if group.rank else ())
    optimizer.step()
    for whole in _wholes(model).values():
        assert whole.isfinite().all()


@ranks(2)
def test_state_is_that_of_own_parameters_and_replicas_stay_equal():
    model, groups = muon_layouts.dealt()
    optimizer = _muon(model, **groups)
    _train(model, optimizer, range(2))
    held = sum(t.numel() for state in optimizer.state.values() for t in state.values() if t.dim())
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    whole = sum(sizes.values()) + sizes["norm"] + sizes["embed_tokens"]
    world = Group.of(dist.group.WORLD)
    assert int(world.all_reduce(torch.tensor(held))) == whole
    assert max(world.all_gather_object(held)) < 0.7 * whole
    for parameter in model.parameters():
        assert torch.equal(*world.all_gather(parameter.detach()))


def test_masters_keep_what_16_bits_cannot():
    model = muon_layouts.Parts(dtype=torch.bfloat16)
    optimizer = Muon(model, lr=1e-5, weight_decay=0.0, adamw={"lr": 1e-5, "weight_decay": 0.0})
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(5):
        muon_layouts.set_gradients(model, 1)
        optimizer.step()
    for name, parameter in model.named_parameters():
        master = optimizer.state[parameter]["master"]
        assert master.dtype == torch.float32
        assert torch.equal(parameter, master.bfloat16())
        assert not torch.equal(master, before[name].float())


def test_a_schedule_and_rules_set_the_rates():
    model, _ = muon_layouts.alone()
    named = dict(model.named_parameters())
    first = {"params": [named.pop("up")], "lr": 0.5, "algorithm": "adamw"}
    optimizer = _muon(model, groups=[first, {"params": list(named.values()), "weight_decay": 0.0}])
    algorithms = [
        (g["algorithm"], g["lr"], g["weight_decay"]) for g in optimizer.param_groups if g["params"]
    ]
    assert algorithms == [("adamw", 0.5, 0.1), ("muon", 0.05, 0.0), ("adamw", 0.02, 0.0)]
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    _train(model, optimizer, range(1))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])


def test_a_state_dict_goes_on_where_it_stopped():
    model, _ = muon_layouts.alone()
    optimizer = _muon(model)
    _train(model, optimizer, range(3))
    again = copy.deepcopy(model)
    fresh = Muon(again, lr=0.9)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    _train(again, fresh, range(3, 5))
    _check(again, muon_layouts.plain_weights(5))
    with pytest.raises(ValueError, match="must have the fields"):
        Muon(nn.Linear(2, 2)).load_state_dict(optimizer.state_dict())


@ranks(4)
@pytest.mark.parametrize("after", [muon_layouts.tp_fsdp, muon_layouts.alone, muon_layouts.etp])
@pytest.mark.parametrize("before", [muon_layouts.tp_dealt, muon_layouts.fsdp])
def test_a_checkpoint_goes_on_in_another_layout(before, after, tmp_path):
    from megablocks_core import ckpt

    world = Group.of(dist.group.WORLD)
    model, groups = before()
    optimizer = _muon(model, **groups)
    _train(model, optimizer, range(3))
    ckpt.save(tmp_path / "saved", {"model": model, "optimizer": optimizer}, group=world)
    model, groups = after()
    optimizer = Muon(model, lr=0.9, **groups)
    _train(model, optimizer, range(7, 8))
    ckpt.load(tmp_path / "saved", {"model": model, "optimizer": optimizer}, group=world)
    _train(model, optimizer, range(3, 5))
    _check(model, muon_layouts.plain_weights(5))


@ranks(2)
@pytest.mark.parametrize(
    ("mode", "sizes"),
    [
        ("gather", {"all_reduce": [8], "all_to_all": [8 * 24] * 2}),
        ("duplicated", {"all_reduce": [8], "all_gather": [8 * 48]}),
        ("distributed", {"all_reduce": [8, 8] + [8 * 16] * 5}),
    ],
)
def test_many_matrices_share_their_messages(mode, sizes):
    """Eight of 4 x 12: flags, norms, and halves to owners and back, wholes, or Gram matrices."""
    group = Mesh(tp=2).group("tp")
    model = nn.ParameterDict()
    for index in range(8):
        model[f"w{index}"] = nn.Parameter(torch.randn(4, 6))
        mark(model, f"w{index}", ShardSpec(1, group))
        model[f"w{index}"].grad = torch.randn(4, 6)
    optimizer = Muon(model, mode=mode)
    with Traffic() as traffic:
        optimizer.step()
    assert traffic.sorted_sizes() == sizes


@ranks(2)
def test_what_is_dealt_out_is_gathered_once():
    group = Mesh(dp=2).group("dp")
    model = nn.ParameterDict({f"w{index}": nn.Parameter(torch.randn(4, 6)) for index in range(8)})
    for parameter in model.values():
        parameter.grad = torch.ones(4, 6)
    optimizer = Muon(model, group=group)
    with Traffic() as traffic:
        optimizer.step()
    assert traffic.sizes == {"all_gather": [8 * 24]}


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"adamw": {"amsgrad": True}}, r"adamw has \['amsgrad'\]"),
        ({"groups": [{"params": []}]}, r"missing \['weight', 'bias'\]"),
        ({"groups": [{"params": [nn.Parameter(torch.ones(1))]}]}, "one of the module"),
        ({"groups": [{"params": [], "lars": 1}]}, r"groups\[0\] has \['lars'\]"),
        ({"groups": [{"params": [], "algorithm": "sgd"}]}, "algorithm='sgd' must be"),
    ],
)
def test_groups_that_do_not_fit_are_refused(options, rule):
    with pytest.raises(ValueError, match=rule):
        Muon(nn.Linear(3, 2), **options)


def test_what_it_cannot_update_is_refused_by_name():
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="bias of shape"):
        Muon(model, groups=[{"params": list(model.parameters()), "algorithm": "muon"}])
    with pytest.raises(ValueError, match="must have a parameter that is trained"):
        Muon(nn.Tanh())
    with pytest.raises(ValueError, match="weight is on meta"):
        Muon(nn.Linear(3, 2, device="meta"))
    model.bias.requires_grad_(False)
    optimizer = Muon(model)
    set_gradient_shard(model.weight, GradientShard(torch.zeros(6), 0, LOCAL))
    with pytest.raises(ValueError, match="weight must have a whole gradient"):
        optimizer.step()
    set_gradient_shard(model.weight, None)
    model.bias.requires_grad_(True)
    with pytest.raises(ValueError, match=r"\['bias'\] must be trained when"):
        optimizer.step()
    with pytest.raises(ValueError, match="must be given at construction"):
        optimizer.add_param_group({"params": [model.bias]})
