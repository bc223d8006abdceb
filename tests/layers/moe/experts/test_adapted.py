"""Experts with adapters: every form gives what a plain loop over merged weights gives."""

import copy
import pickle

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses import FakeTensorMode
from torch.nn.functional import linear, silu

from megablocks_core.layers.moe.dispatch import LocalDispatcher
from megablocks_core.layers.moe.experts import GroupedExperts
from megablocks_core.layers.moe.experts.adapted import Counted
from megablocks_core.parallel import add_lora, remove_lora
from tests.layers.moe.experts.cases import (
    FFN,
    HIDDEN,
    NUM_EXPERTS,
    ROUTINGS,
    assert_close,
    built,
    everything,
    routing,
)
from tests.layers.moe.experts.lora_cases import with_adapters

F64 = torch.float64
FORMS = ("loop", "grouped", "block_sparse", "capacity")


def _adapted(form, patterns="*_proj", *, dtype=F64, **options):
    return with_adapters(built(form, dtype=dtype, **options), patterns)


def _trained(experts, x, routed):
    """Outputs and gradients that there are."""
    results = everything(experts, x, routed)
    return {name: value for name, value in results.items() if value is not None}


def _plain(experts, x, weights, indices):
    """The sum over the slots of each token, one expert's merged matrices at a time."""
    scale, stacks = 6.0 / 3, {}
    for name in ("gate_proj", "up_proj", "down_proj"):
        a, b = (experts.get_parameter(f"{name}_lora_{x}.weight") for x in "AB")
        stacks[name] = [
            w + scale * b_one @ a_one
            for w, a_one, b_one in zip(experts.get_parameter(name), a, b, strict=True)
        ]
    rows = []
    for x_1H, row, chosen in zip(x, weights, indices, strict=True):
        total = torch.zeros_like(x_1H)
        for weight, index in zip(row, chosen.tolist(), strict=True):
            if index >= 0:
                gate, up, down = (stacks[name][index] for name in stacks)
                hidden = silu(linear(x_1H, gate)) * linear(x_1H, up)
                total = total + weight * linear(hidden, down)
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("form", FORMS)
def test_outputs_and_gradients_are_those_of_a_plain_loop(form):
    indices = ROUTINGS["empty slots"]
    routed = routing(indices, capacity=4 if form == "capacity" else None)
    experts = _adapted(form)
    x = torch.randn(4, HIDDEN, dtype=F64)
    ours = everything(experts, x, routed)
    x_leaf = x.clone().requires_grad_()
    weights = routed.weights.detach().clone().requires_grad_()
    experts.zero_grad()
    y = _plain(experts, x_leaf, weights, torch.tensor(indices))
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y))
    grads = {name: parameter.grad for name, parameter in experts.named_parameters()}
    assert {name for name, grad in ours.items() if grad is None} == {
        "gate_proj",
        "up_proj",
        "down_proj",
    }
    empty = torch.tensor(indices) < 0
    weights_grad = weights.grad.masked_fill(empty, 0)
    theirs = {"y": y.detach(), "x": x_leaf.grad, "weights": weights_grad, **grads}
    mine = {name: value for name, value in ours.items() if value is not None}
    mine["weights"] = mine["weights"].masked_fill(empty, 0)
    assert_close(mine, {name: theirs[name] for name in mine}, rtol=1e-12)


@pytest.mark.parametrize("case", ROUTINGS)
@pytest.mark.parametrize("patterns", ["*_proj", "up_proj", ["gate_proj", "down_proj"]], ids=str)
def test_forms_give_what_the_loop_gives(case, patterns):
    for capacity in (None, 2, 6):
        routed = routing(ROUTINGS[case], capacity=capacity)
        x = torch.randn(len(routed.indices), HIDDEN, dtype=F64)
        theirs = _trained(_adapted("loop", patterns), x, routed)
        for form in ("grouped", "block_sparse") if capacity is None else FORMS[1:]:
            assert_close(_trained(_adapted(form, patterns), x, routed), theirs, rtol=1e-12)


@pytest.mark.parametrize("weigh", ("hidden", "input", "output"))
@pytest.mark.parametrize("activation", ("swiglu", "clamped_swiglu", "relu2"))
def test_activations_biases_and_weighings_agree(activation, weigh):
    options = {"bias": True, "activation": activation, "weigh": weigh}
    for capacity in (None, 2):
        routed = routing(ROUTINGS["mixed"], capacity=capacity)
        x = torch.randn(5, HIDDEN, dtype=F64)
        mine, theirs = (_trained(_adapted(form, **options), x, routed) for form in FORMS[1::-1])
        assert_close(mine, theirs, rtol=1e-12)


@pytest.mark.parametrize("form", ("grouped", "capacity"))
def test_a_base_that_thaws_has_its_gradients(form):
    routed = routing(ROUTINGS["mixed"], capacity=3 if form == "capacity" else None)
    x = torch.randn(5, HIDDEN, dtype=F64)
    mine, theirs = (
        everything(_adapted(name, bias=True).requires_grad_(), x, routed) for name in (form, "loop")
    )
    assert mine["up_proj"].any() and mine["down_bias"].any()
    assert_close(mine, theirs, rtol=1e-12)


def test_a_factor_alone_trains():
    routed, x = routing(ROUTINGS["mixed"]), torch.randn(5, HIDDEN, dtype=F64)
    whole = everything(_adapted("loop"), x, routed)
    for name in ("up_proj_lora_A.weight", "down_proj_lora_B.weight"):
        experts = _adapted("grouped").requires_grad_(False)
        experts.get_parameter(name).requires_grad_()
        mine = _trained(experts, x, routed)
        assert_close(mine, {key: whole[key] for key in mine}, rtol=1e-12)
        assert [key for key in mine if "lora" in key] == [name]


@pytest.mark.parametrize("form", ("grouped", "capacity"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_smaller_dtypes_are_near_the_loop_in_float64(form, dtype):
    indices = torch.rand(300, NUM_EXPERTS).topk(2).indices
    routed = routing(indices, capacity=200 if form == "capacity" else None)
    x = torch.randn(300, HIDDEN, dtype=dtype)
    experts = _adapted(form, bias=True).to(dtype)
    twin = _adapted("loop", bias=True).to(dtype).to(F64)
    mine = _trained(experts, x, routed._replace(weights=routed.weights.detach().float()))
    theirs = _trained(twin, x.double(), routed)
    assert_close(mine, theirs, rtol=2e-6 if dtype == torch.float32 else 2e-2)


def test_small_adapters_lose_less_than_in_the_rounding_of_the_weights():
    """In bfloat16 most of the twin's weights stay as they were under a small product."""
    torch.manual_seed(0)
    options = {"activation": "relu", "dtype": torch.bfloat16}
    experts = GroupedExperts(NUM_EXPERTS, 64, 1024, **options)
    add_lora(experts, "down_proj", rank=8, alpha=16)
    experts.stack_adapters["down_proj"].b.weight.data.normal_(std=3e-4)
    weight, added = experts.down_proj.detach(), experts.stack_adapters["down_proj"].added_weight()
    assert (weight + added.bfloat16() == weight).float().mean() > 0.5
    routed = routing(torch.rand(200, NUM_EXPERTS).topk(1).indices, dtype=torch.float32)
    x = torch.randn(200, 64, dtype=torch.bfloat16)
    dispatched, _ = LocalDispatcher().dispatch(x, routed)
    exact = _moved(copy.deepcopy(experts).double(), dispatched)
    ours = _moved(experts, dispatched)
    experts.form = "loop"
    twins = _moved(experts, dispatched)
    assert (ours - exact).norm() < 0.7 * (twins - exact).norm()


def _moved(experts, dispatched):
    """What the adapters add to results."""
    dispatched = dispatched._replace(x=dispatched.x.to(experts.up_proj.dtype))
    with torch.no_grad():
        bare = copy.deepcopy(experts)
        remove_lora(bare)
        return (experts(dispatched) - bare(dispatched)).double()


def test_adapters_of_another_dtype_compute_in_it():
    experts = built("grouped", dtype=torch.bfloat16)
    with_adapters(experts, dtype=torch.float32)
    routed = routing(ROUTINGS["mixed"], dtype=torch.float32)
    y = _trained(experts, torch.randn(5, HIDDEN, dtype=torch.bfloat16), routed)
    assert y["y"].dtype == torch.bfloat16
    assert y["up_proj_lora_A.weight"].dtype == torch.float32


def test_autocast_computes_in_its_dtype():
    for form in ("grouped", "loop"):
        experts, routed = _adapted(form, dtype=torch.float32), routing([[0, 2], [1, 0]])
        x = torch.randn(2, HIDDEN, requires_grad=True)
        dispatched, _ = LocalDispatcher().dispatch(x, routed)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = experts(dispatched._replace(weights=dispatched.weights.float()))
        assert y.dtype == torch.bfloat16
        y.float().sum().backward()
        assert experts.get_parameter("up_proj_lora_A.weight").grad.dtype == torch.float32


@pytest.mark.parametrize("form", ("grouped", "capacity"))
def test_what_is_kept_grows_by_the_hidden_activation_alone(form):
    """M H + 3 N i + N numbers, in place of M H + 2 N i + N, and nothing of size N H or e i H."""
    tokens, width, features, top_k = 64, 32, 16, 4
    torch.manual_seed(0)
    experts = GroupedExperts(NUM_EXPERTS, width, features, form=form, dtype=torch.float32)
    add_lora(experts, "*_proj", rank=2, alpha=2)
    indices = torch.arange(NUM_EXPERTS).expand(tokens, top_k)
    capacity = tokens if form == "capacity" else None
    routed = routing(indices, capacity=capacity, dtype=torch.float32)
    x = torch.randn(tokens, width, requires_grad=True)
    dispatched, _ = LocalDispatcher().dispatch(x, routed)
    own = {parameter.data_ptr() for parameter in experts.parameters()}
    kept = {}

    def keep(tensor):
        if tensor.is_floating_point() and tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        experts(dispatched)
    places = tokens * top_k
    numbers = sum(tensor.numel() for tensor in kept.values())
    assert numbers == tokens * width + 3 * places * features + places


def test_places_that_are_empty_give_zeros_and_their_weights_get_none():
    for weigh in ("hidden", "input", "output"):
        routed = routing(ROUTINGS["empty slots"])
        dispatched, _ = LocalDispatcher().dispatch(torch.randn(4, HIDDEN, dtype=F64), routed)
        weights = dispatched.weights.detach().requires_grad_()
        y = _adapted("grouped", bias=True, weigh=weigh)(dispatched._replace(weights=weights))
        y.backward(torch.ones_like(y))
        empty = dispatched.rows < 0
        assert empty.any() and not y[empty].any() and not weights.grad[empty].any()
        assert weights.grad[~empty].all()


def test_the_capacity_form_refuses_tokens_without_a_capacity():
    dispatched, _ = LocalDispatcher().dispatch(torch.ones(1, HIDDEN, dtype=F64), routing([[0, 1]]))
    with pytest.raises(ValueError, match="capacity=None"):
        _adapted("capacity")(dispatched)


@pytest.mark.parametrize("form", ("grouped", "capacity"))
def test_a_capacity_needs_nothing_of_the_host(form):
    experts = _adapted(form, bias=True)
    with FakeTensorMode():
        shapes = {name: parameter.shape for name, parameter in experts.named_parameters()}
        fakes = {
            name: torch.empty(shape, dtype=F64, requires_grad=True)
            for name, shape in shapes.items()
        }
        routed = routing(torch.zeros(5, 2, dtype=torch.int64), capacity=3)
        x = torch.randn(5, HIDDEN, dtype=F64, requires_grad=True)
        dispatched, _ = LocalDispatcher().dispatch(x, routed)
        torch.func.functional_call(experts, fakes, (dispatched,)).sum().backward()
        assert x.grad is not None and all(fake.grad is not None for fake in fakes.values())


@pytest.mark.parametrize("form", ("grouped", "capacity"))
def test_compiled_whole_at_most_twice_over_routings(form):
    torch._dynamo.reset()
    experts = _adapted(form, dtype=torch.float32)
    counter = CompileCounter()

    def call(x, dispatched):
        return experts(dispatched._replace(x=x))

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    counted = torch.compile(call, fullgraph=True, backend=counter)
    factors = [parameter for parameter in experts.parameters() if parameter.requires_grad]
    for step in range(5):
        indices = torch.rand(24 + step % 5, NUM_EXPERTS).topk(2).indices
        routed = routing(indices, capacity=16 if form == "capacity" else None)
        dispatched, _ = LocalDispatcher().dispatch(torch.empty(len(indices), HIDDEN), routed)
        dispatched = dispatched._replace(weights=dispatched.weights.detach().float())
        x = torch.randn(len(indices), HIDDEN, requires_grad=True)
        counted(x, dispatched)
        if step > 0:
            continue
        mine = torch.autograd.grad(compiled(x, dispatched).square().sum(), [x, *factors])
        theirs = torch.autograd.grad(call(x, dispatched).square().sum(), [x, *factors])
        for one, other in zip(mine, theirs, strict=True):
            assert (one - other).norm() <= 1e-5 * (1 + other.norm())
    assert counter.frame_count <= 3


def test_experts_after_each_other_compute_products_and_their_gradients():
    """In 16-bit dtypes rows are counted in steps, which later experts overwrite."""
    for dtype, tolerance in ((F64, 1e-12), (torch.bfloat16, 2e-2)):
        products = Counted((3, 0, 70, 5))
        w = torch.randn(4, FFN, HIDDEN, dtype=dtype)
        x, dy = (torch.randn(80, size, dtype=dtype) for size in (HIDDEN, FFN))
        of_x, of_w = products.input_gradient(dy, w), products.weight_gradient(dy, x, w)
        y, bias = products.forward(x, w), torch.zeros(80, FFN, dtype=dtype)
        products.add_bias_(bias, w[:, :, 0])
        for expert, start, stop in ((0, 0, 3), (1, 3, 3), (2, 3, 73), (3, 73, 78)):
            own = slice(start, stop)
            pairs = (
                (y[own], x[own] @ w[expert].T),
                (of_x[own], dy[own] @ w[expert]),
                (of_w[expert], dy[own].T @ x[own]),
                (bias[own], w[expert, :, 0].expand(stop - start, -1)),
                (products.bias_gradient(dy, w[:, :, 0])[expert], dy[own].sum(0)),
            )
            for ours, theirs in pairs:
                assert (ours - theirs).norm() <= tolerance * (1 + theirs.norm())


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_have_adapters_of_their_own(way):
    experts = _adapted("grouped")
    twin = copy.deepcopy(experts) if way == "deepcopy" else pickle.loads(pickle.dumps(experts))
    with torch.no_grad():
        twin.get_parameter("up_proj_lora_B.weight").zero_()
    assert not twin.stack_adapters["up_proj"].b.weight.any()
    assert experts.stack_adapters["up_proj"].b.weight.any()
