"""Experts as a module: parameters, marks, initial values, groups and errors."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounter
from torch._subclasses import FakeTensorMode

from megablocks_core.groups import Mesh, marks, whole_tensor
from megablocks_core.layers.moe.dispatch import LocalDispatcher
from megablocks_core.layers.moe.experts import GroupedExperts
from megablocks_core.parallel import reset_parameters
from megablocks_core.testing import ranks
from tests.layers.moe.experts.cases import (
    FFN,
    HIDDEN,
    NUM_EXPERTS,
    assert_close,
    built,
    everything,
    routing,
)


def test_parameters_have_the_names_and_shapes_of_stacked_linear_layers():
    shapes = {name: tuple(p.shape) for name, p in built(bias=True).named_parameters()}
    assert shapes == {
        "gate_proj": (NUM_EXPERTS, FFN, HIDDEN),
        "up_proj": (NUM_EXPERTS, FFN, HIDDEN),
        "down_proj": (NUM_EXPERTS, HIDDEN, FFN),
        "gate_bias": (NUM_EXPERTS, FFN),
        "up_bias": (NUM_EXPERTS, FFN),
        "down_bias": (NUM_EXPERTS, HIDDEN),
    }
    plain = dict(built(activation="relu2").named_parameters())
    assert list(plain) == ["up_proj", "down_proj"]


def test_marks_name_each_expert_and_its_group():
    for name, _, specs in marks(built(bias=True)):
        layer, leaf = name.split("_")
        kind = "weight" if leaf == "proj" else "bias"
        assert specs.expert and specs.each == f"experts.{{}}.{layer}_proj.{kind}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "tanh"}, "activation='tanh' must be one of swiglu"),
        ({"form": "sparse"}, "form='sparse' must be one of grouped"),
        ({"weigh": "twice"}, "weigh='twice' must be one of hidden"),
    ],
)
def test_unknown_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        built(**{"form": "grouped", **options})


def test_the_capacity_form_refuses_tokens_without_a_capacity():
    dispatched, _ = LocalDispatcher().dispatch(
        torch.ones(1, HIDDEN, dtype=torch.float64), routing([[0, 1]])
    )
    with pytest.raises(ValueError, match="capacity=None"):
        built("capacity")(dispatched)


@ranks(4)
def test_f080_experts_that_do_not_divide_are_refused():
    mesh = Mesh(dp=4, ep=4)
    ep = mesh.expert.group("ep")
    for num_experts in (6, 2):
        with pytest.raises(ValueError, match=f"num_experts={num_experts} must divide evenly"):
            GroupedExperts(num_experts, HIDDEN, FFN, ep=ep)
    with pytest.raises(ValueError, match="ffn_size=6 must divide evenly"):
        GroupedExperts(4, HIDDEN, 6, etp=ep)


@ranks(2, 4)
def test_shares_of_experts_give_the_outputs_and_gradients_of_all():
    size = dist.get_world_size()
    routed = routing([[0, 2], [1, 0], [3, 1], [0, 1], [2, 0]])
    x = torch.randn(5, HIDDEN, dtype=torch.float64)
    for axis, form in (("ep", "grouped"), ("etp", "grouped"), ("etp", "block_sparse")):
        mesh = Mesh(dp=size, ep=size) if axis == "ep" else Mesh(dp=1, tp=size, etp=size)
        group = mesh.expert.group(axis)
        for options in ({"bias": True}, {"bias": True, "weigh": "input"}):
            theirs = everything(built("loop", **options), x, routed)
            mine = _shared(built(form, **{axis: group}, **options), x, routed, group, axis)
            assert_close(mine, theirs, rtol=1e-12)


@ranks(1, 2, 4)
def test_one_seed_is_one_model_at_any_size_and_from_meta():
    size = dist.get_world_size()
    twin = GroupedExperts(NUM_EXPERTS, HIDDEN, FFN, bias=True)
    reset_parameters(twin, seed=3)
    for axis in ("ep", "etp"):
        mesh = Mesh(dp=size, ep=size) if axis == "ep" else Mesh(dp=1, tp=size, etp=size)
        group = mesh.expert.group(axis)
        cut = GroupedExperts(NUM_EXPERTS, HIDDEN, FFN, bias=True, device="meta", **{axis: group})
        cut.to_empty(device="cpu")
        reset_parameters(cut, seed=3)
        for name, parameter, specs in marks(cut):
            assert torch.equal(whole_tensor(parameter, specs), getattr(twin, name).detach())


@pytest.mark.parametrize("form", ("grouped", "capacity"))
@pytest.mark.parametrize("weigh", ("hidden", "input", "output"))
def test_a_capacity_needs_nothing_of_the_host(form, weigh):
    experts = built(form, bias=True, weigh=weigh)
    with FakeTensorMode():
        shapes = {name: parameter.shape for name, parameter in experts.named_parameters()}
        fakes = {
            name: torch.empty(shape, dtype=torch.float64, requires_grad=True)
            for name, shape in shapes.items()
        }
        routed = routing(torch.zeros(5, 2, dtype=torch.int64), capacity=3)
        x = torch.randn(5, HIDDEN, dtype=torch.float64, requires_grad=True)
        dispatched, _ = LocalDispatcher().dispatch(x, routed)
        torch.func.functional_call(experts, fakes, (dispatched,)).sum().backward()
        assert x.grad is not None and all(fake.grad is not None for fake in fakes.values())


@pytest.mark.parametrize("form", ("grouped", "capacity"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_compiled_whole_at_most_twice_over_routings(form, dtype):
    torch._dynamo.reset()
    experts = built(form, bias=True, dtype=dtype)
    counter = CompileCounter()

    def call(x, dispatched):
        return experts(dispatched._replace(x=x))

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    counted = torch.compile(call, fullgraph=True, backend=counter)
    for step in range(20):
        indices = torch.rand(24 + step % 5, NUM_EXPERTS).topk(2).indices
        routed = routing(indices, capacity=16 if form == "capacity" else None)
        dispatched, _ = LocalDispatcher().dispatch(torch.empty(len(indices), HIDDEN), routed)
        dispatched = dispatched._replace(weights=dispatched.weights.detach().float())
        x, twin = (torch.ones(len(indices), HIDDEN, dtype=dtype, requires_grad=True) for _ in "xt")
        counted(x, dispatched)
        if step > 2:
            continue
        experts.zero_grad()
        compiled(x, dispatched).sum().backward()
        mine = [x.grad, *(parameter.grad for parameter in experts.parameters())]
        experts.zero_grad()
        call(twin, dispatched).sum().backward()
        theirs = [twin.grad, *(parameter.grad for parameter in experts.parameters())]
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        for one, other in zip(mine, theirs, strict=True):
            assert one is not None and other is not None
            assert (one - other).norm() <= tolerance * (1 + other.norm())
    assert counter.frame_count <= 3


def test_autocast_computes_in_its_dtype():
    experts, routed = built("grouped", dtype=torch.float32), routing([[0, 2], [1, 0]])
    x = torch.randn(2, HIDDEN, requires_grad=True)
    dispatched, _ = LocalDispatcher().dispatch(x, routed)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = experts(dispatched._replace(weights=dispatched.weights.float()))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert experts.up_proj.grad.dtype == torch.float32 and x.grad.dtype == torch.float32


def _shared(experts, x, routed, group, axis):
    """``everything`` of one process, from experts or features cut by hand over ``group``."""
    if axis == "etp":
        mine = everything(experts, x, routed)
        summed = ("y", "x", "weights")
    else:
        own = experts.experts
        here = (routed.indices >= own.start) & (routed.indices < own.stop)
        indices = torch.where(here, routed.indices - own.start, -1)
        weights = torch.where(here, routed.weights, 0).detach()
        scores = torch.zeros(len(x), own.stop - own.start)
        cut = routed._replace(indices=indices, weights=weights, scores=scores)
        mine = everything(experts, x, cut)
        mine["weights"] = torch.where(here, mine["weights"], 0)
        summed = ("y", "x", "weights")
    whole = {name: group.all_reduce(mine[name]) for name in summed}
    for name, parameter, specs in marks(experts):
        whole[name] = whole_tensor(parameter.grad, specs)
    return whole


def test_experts_are_copied_and_pickled():
    experts = built(bias=True)
    for twin in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))):
        assert twin.formula == experts.formula
        torch.testing.assert_close(twin.state_dict(), experts.state_dict(), atol=0, rtol=0)
