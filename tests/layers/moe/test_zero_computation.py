"""Experts without computation give what their kind says, and no token travels to them."""

import pytest
import torch
from torch.testing import assert_close

from megablocks_core.layers.moe import MoE, ZeroComputationExperts
from megablocks_core.layers.moe.dispatch import LocalDispatcher
from megablocks_core.layers.moe.experts import GroupedExperts
from megablocks_core.layers.moe.routers import TopKRouter
from megablocks_core.layers.moe.routing import NOWHERE
from megablocks_core.layers.moe.zero_computation import computed
from megablocks_core.parallel import reset_parameters

F64 = torch.float64
WIDTH, REAL, TOKENS = 6, 3, 9


def test_each_kind_gives_what_it_says():
    free, moe, x = _free(), _layer(), _tokens()
    y, routing = moe(x)
    expected = torch.zeros_like(x)
    for token in range(TOKENS):
        for expert, weight in zip(routing.indices[token], routing.weights[token], strict=True):
            expected[token] += weight * _one(moe, int(expert), x[token])
    assert_close(y, expected)
    assert routing.num_experts == REAL + free.num_experts
    assert (routing.tokens_per_expert[REAL:] > 0).any()
    assert routing.tokens_per_expert.sum() == TOKENS * 3


def test_gradients_are_those_of_the_sum():
    moe, x = _layer(), _tokens().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: moe(x)[0], [x])
    moe(x)[0].square().sum().backward()
    grads = {name: weight.grad for name, weight in moe.named_parameters()}
    assert all(grads[f"zero_computation.{name}"].any() for name in ("vectors", "mixers"))


def test_their_slots_are_empty_for_the_dispatcher():
    routing = _layer().gate(_tokens())
    sent = computed(routing, 5)
    assert sent.num_experts == REAL and sent.tokens_per_expert.shape == (REAL,)
    free = routing.indices >= REAL
    assert free.any() and (sent.indices[free] == NOWHERE).all()
    assert not sent.weights[free].any()
    assert torch.equal(sent.indices[~free], routing.indices[~free])


def test_identity_alone_keeps_dtype_and_has_no_weights():
    free = ZeroComputationExperts(WIDTH, identity=2)
    assert not list(free.parameters())
    routing = TopKRouter(WIDTH, num_experts=2, top_k=1)(_tokens().float())
    x = _tokens().bfloat16()
    assert torch.equal(free(x, routing), x)


def test_a_seed_gives_the_values():
    free = _free()
    reset_parameters(free, seed=1)
    first = free.mixers.detach().clone()
    with torch.no_grad():
        free.mixers.zero_()
        free.vectors.fill_(1)
    reset_parameters(free, seed=1)
    assert torch.equal(free.mixers, first) and not free.vectors.any()


@pytest.mark.parametrize("kinds", [{}, {"identity": -1, "zero": 2}, {"zero": 1.5}])
def test_numbers_that_make_no_sense_are_refused(kinds):
    with pytest.raises(ValueError, match="must be above 0|must be a whole number"):
        ZeroComputationExperts(WIDTH, **kinds)


def _free():
    torch.manual_seed(1)
    free = ZeroComputationExperts(WIDTH, identity=1, zero=2, constant=2, dtype=F64)
    with torch.no_grad():
        free.vectors.normal_()
    return free


def _layer():
    torch.manual_seed(0)
    return MoE(
        router=TopKRouter(WIDTH, num_experts=REAL + 5, top_k=3, dtype=F64),
        dispatcher=LocalDispatcher(),
        experts=GroupedExperts(REAL, WIDTH, 4, dtype=F64),
        zero_computation=_free(),
    )


def _tokens():
    return torch.randn(TOKENS, WIDTH, dtype=F64, generator=torch.Generator().manual_seed(2))


def _one(moe, expert, x):
    if expert < REAL:
        gate, up, down = (
            getattr(moe.experts, f"{name}_proj")[expert] for name in ("gate", "up", "down")
        )
        return down @ (torch.nn.functional.silu(gate @ x) * (up @ x))
    if expert == REAL:
        return x
    if expert < REAL + 3:
        return torch.zeros_like(x)
    constant = expert - REAL - 3
    mine = moe.zero_computation
    kept, own = (mine.mixers[constant] @ x).softmax(0)
    return kept * x + own * mine.vectors[constant]
