"""Every form of experts gives what the loop gives, with every gradient."""

import pytest
import torch

from megablocks_core.layers.moe.experts.activations import ACTIVATIONS
from tests.layers.moe.experts.cases import (
    HIDDEN,
    NUM_EXPERTS,
    ROUTINGS,
    assert_close,
    built,
    everything,
    routing,
)

FORMS = ("grouped", "block_sparse")
WEIGH = ("hidden", "input", "output")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", ROUTINGS)
def test_forms_give_what_the_loop_gives(form, case):
    routed = routing(ROUTINGS[case])
    _assert_like_loop(form, routed, bias=True)


@pytest.mark.parametrize("form", ("grouped", "capacity", "block_sparse"))
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("weigh", WEIGH)
def test_activations_and_weighings_agree(form, activation, weigh):
    capacity = 2 if form == "capacity" else None
    routed = routing(ROUTINGS["mixed"], capacity=capacity)
    for bias in (False, True):
        _assert_like_loop(form, routed, bias=bias, activation=activation, weigh=weigh)


@pytest.mark.parametrize("form", ("grouped", "capacity", "block_sparse"))
@pytest.mark.parametrize("case", ROUTINGS)
def test_a_capacity_drops_alike(form, case):
    for capacity in (1, 2, 6):
        _assert_like_loop(form, routing(ROUTINGS[case], capacity=capacity), bias=True)


@pytest.mark.parametrize("form", ("grouped", "capacity", "block_sparse"))
def test_experts_find_the_places_of_a_row_themselves(form):
    routed = routing(ROUTINGS["empty slots"], capacity=3 if form == "capacity" else None)
    x = torch.randn(4, HIDDEN, dtype=torch.float64)
    mine = everything(built(form), x, routed, places=False)
    assert_close(mine, everything(built("loop"), x, routed), rtol=1e-12)


@pytest.mark.parametrize("form", ("grouped", "capacity", "block_sparse"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_smaller_dtypes_are_near_the_loop_in_float64(form, dtype):
    indices = torch.rand(300, NUM_EXPERTS).topk(2).indices
    routed = routing(indices, capacity=200 if form == "capacity" else None)
    x = torch.randn(300, HIDDEN, dtype=dtype)
    experts, twin = (built(f, bias=True) for f in (form, "loop"))
    mine = everything(
        experts.to(dtype), x, routed._replace(weights=routed.weights.detach().float())
    )
    theirs = everything(twin.to(dtype).double(), x.double(), routed)
    assert mine["weights"].dtype == torch.float32
    assert_close(mine, theirs, rtol=2e-6 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("form", ("grouped", "capacity", "block_sparse"))
def test_the_same_bits_in_each_run(form):
    indices = torch.rand(300, NUM_EXPERTS).topk(2).indices
    routed = routing(indices, capacity=200 if form == "capacity" else None)
    x, experts = torch.randn(300, HIDDEN), built(form, bias=True, dtype=torch.float32)
    first, second = ({**everything(experts, x, routed)} for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def _assert_like_loop(form, routed, **options):
    x = torch.randn(len(routed.indices), HIDDEN, dtype=torch.float64)
    mine, theirs = (everything(built(name, **options), x, routed) for name in (form, "loop"))
    assert_close(mine, theirs, rtol=1e-12)
