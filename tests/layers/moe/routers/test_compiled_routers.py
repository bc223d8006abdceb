"""Every router compiles whole, hardly ever again, and reads nothing on the host."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.testing import assert_close

from megablocks_core.layers.moe import (
    BalancedRouter,
    Capacity,
    ExpertChoiceRouter,
    GroupLimit,
    HashRouter,
    Jitter,
    QuantileRouter,
    SinkhornRouter,
    TopKRouter,
    update_quantile_bias,
    update_selection_bias,
)

H, E = 8, 8
SIZES = {"num_experts": E, "top_k": 2}


def made(name):
    match name:
        case "top_k":
            return TopKRouter(H, **SIZES)
        case "many":
            return TopKRouter(H, num_experts=16, top_k=10, capacity=Capacity(0.5))
        case "groups":
            return TopKRouter(
                H,
                **SIZES,
                score="sigmoid",
                groups=GroupLimit(4, 2, best=2),
                bias=True,
                selection_bias=True,
                jitter=Jitter(0.1, stream="a"),
                capacity=Capacity(0.5, drop="position"),
                dtype=torch.bfloat16,
            )
        case "expert_choice":
            return ExpertChoiceRouter(H, num_experts=E, capacity_factor=2.0)
        case "sinkhorn":
            return SinkhornRouter(H, **SIZES, iterations=3)
        case "quantile":
            return QuantileRouter(H, **SIZES)
        case "hash":
            return HashRouter(**SIZES, stream="a")
        case _:
            return BalancedRouter(**SIZES)


NAMES = [
    "top_k",
    "many",
    "groups",
    "expert_choice",
    "sinkhorn",
    "quantile",
    "hash",
    "balanced",
]


def call(router, x, mask, index):
    words = {} if isinstance(router, BalancedRouter) else {"index": index}
    return router(x, mask=mask, **words)


def inputs(router, tokens):
    weight = getattr(router, "weight", torch.ones(()))
    x = torch.randn(tokens, H).to(weight.dtype)
    return x, torch.arange(tokens) % 5 > 0, torch.arange(tokens)


FIRST = ("top_k", "groups", "expert_choice")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FIRST else pytest.mark.slow) for n in NAMES]
)
def test_it_compiles_whole_and_at_most_twice_again(name):
    torch._dynamo.reset()
    router = made(name)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for step in range(20):
        x, mask, index = inputs(router, 24 + step % 7)
        ours, plain = (f(router, x, mask, index) for f in (compiled, call))
        assert torch.equal(ours.indices, plain.indices) and ours.capacity == plain.capacity
        assert torch.equal(ours.tokens_per_expert, plain.tokens_per_expert)
        assert_close(ours.weights, plain.weights)
        if hasattr(router, "weight"):
            grads = [
                torch.autograd.grad(routing.weights.square().sum(), router.weight)[0]
                for routing in (ours, plain)
            ]
            assert_close(*grads)
    assert counter.frame_count <= 3


@pytest.mark.parametrize("name", NAMES)
def test_no_value_is_read_on_the_host(name):
    router = made(name)
    x, mask, index = inputs(router, 24)
    words = {} if isinstance(router, BalancedRouter) else {"index": index}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        held = {key: mode.from_tensor(value) for key, value in router.state_dict().items()}
        held = {key: value.requires_grad_(key == "weight") for key, value in held.items()}
        routing = functional_call(router, held, mode.from_tensor(x), {"mask": mask, **words})
        assert routing.indices.shape[0] == 24
        if "weight" in held:
            torch.autograd.grad(routing.weights.sum(), held["weight"])
        bias = torch.zeros(routing.num_experts)
        update_selection_bias(bias, routing.tokens_per_expert, rate=0.1)
        update_quantile_bias(bias, routing.logits, top_k=2, mask=routing.mask)
