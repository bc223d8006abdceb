"""A whole layer, forward and backward, runs no operation whose result may vary between runs."""

import pytest
import torch

from megablocks_core.layers.moe import (
    Capacity,
    ExpertChoiceRouter,
    GroupedExperts,
    GroupLimit,
    LocalDispatcher,
    MoE,
    TopKRouter,
    load_balance_loss,
    z_loss,
)
from tests.layers.moe.operations import VARYING, Operations

E, H, F, T = 8, 16, 8, 24

ROUTERS = {
    "top k": lambda: TopKRouter(H, num_experts=E, top_k=2),
    "all": lambda: TopKRouter(H, num_experts=E, top_k=E),
    "groups": lambda: TopKRouter(
        H, num_experts=E, top_k=2, score="sigmoid", groups=GroupLimit(4, 2), selection_bias=True
    ),
    "capacity": lambda: TopKRouter(H, num_experts=E, top_k=2, capacity=Capacity(1.0)),
    "expert choice": lambda: ExpertChoiceRouter(H, num_experts=E, capacity_factor=2),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("router", ROUTERS)
def test_no_operation_varies_and_runs_give_the_same_bits(router, dtype):
    layer = MoE(
        router=ROUTERS[router](), dispatcher=LocalDispatcher(), experts=GroupedExperts(E, H, F)
    ).to(dtype)
    x = torch.randn(T, H, dtype=dtype, requires_grad=True)
    runs = []
    for _ in range(2):
        layer.zero_grad()
        x.grad = None
        with Operations() as seen:
            y, routing = layer(x)
            losses = load_balance_loss(routing) + z_loss(routing)
            losses = losses + load_balance_loss(routing, sequence_length=T // 2)
            (y.float().square().sum() + losses).backward()
        assert seen.names and not seen.names & VARYING
        runs.append([y, x.grad, *(parameter.grad for parameter in layer.parameters())])
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))
