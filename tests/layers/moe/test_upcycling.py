"""A mixture that was made of a dense layer gives what that gives, at any layout."""

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from megablocks_core.groups import LOCAL, Mesh, gather_whole
from megablocks_core.layers import GatedMLP
from megablocks_core.layers.moe import MoE, upcycle
from megablocks_core.layers.moe.dispatch import LocalDispatcher
from megablocks_core.layers.moe.experts import GroupedExperts
from megablocks_core.layers.moe.routers import BalancedRouter, Capacity, GroupLimit, TopKRouter
from megablocks_core.testing import ranks

F64 = torch.float64
WIDTH, FFN = 8, 12
X = torch.randn(3, 7, WIDTH, dtype=F64, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(("copies", "granularity", "top_k"), [(4, 1, 2), (4, 2, 4), (2, 3, 3)])
@pytest.mark.parametrize("router", [{}, {"score": "sigmoid", "scale": 2.5}])
@pytest.mark.parametrize("bias", [False, True])
def test_the_first_output_is_the_dense_layers(copies, granularity, top_k, router, bias):
    dense = _dense(bias=bias)
    moe = _moe(copies * granularity, top_k, granularity, bias=bias, **router)
    upcycle(dense, moe, granularity=granularity)
    y, routing = moe(X)
    assert_close(y, dense(X), rtol=1e-12, atol=1e-13)
    copy = routing.indices.sort(-1).values.unflatten(-1, (-1, granularity))
    assert (copy // granularity == copy[..., :1] // granularity).all()
    assert torch.equal(copy % granularity, torch.arange(granularity).expand_as(copy))


def test_powers_of_two_are_equal_to_the_bit_with_one_copy_a_token():
    dense, moe = _dense().float(), _moe(4, 1, 1).float()
    upcycle(dense, moe)
    assert torch.equal(moe.experts.down_proj, dense.down_proj.weight.expand(4, -1, -1))
    moe = _moe(4, 2, 2).float()
    upcycle(dense, moe, granularity=2)
    part = dense.down_proj.weight.chunk(2, 1)
    assert torch.equal(moe.experts.down_proj, 2 * torch.stack([*part, *part]))


def test_copies_route_apart_and_learn_apart():
    dense, moe = _dense(), _moe(4, 2, 2)
    upcycle(dense, moe, granularity=2)
    rows = moe.gate.weight
    assert torch.equal(rows[0], rows[1]) and torch.equal(rows[2], rows[3])
    assert not torch.equal(rows[0], rows[2])
    moe(X)[0].square().sum().backward()
    assert not torch.allclose(moe.experts.up_proj.grad[0], moe.experts.up_proj.grad[2])


@ranks(2)
def test_a_dense_layer_that_is_cut_fills_experts_that_are_cut():
    mesh = Mesh(tp=2, ep=2)
    whole = _moe(4, 2, 2)
    upcycle(_dense(), whole, granularity=2)
    dense = _dense(tp=mesh.group("tp"))
    torch.manual_seed(0)
    cut = GroupedExperts(4, WIDTH, FFN // 2, ep=mesh.expert.group("ep"), dtype=F64)
    router = TopKRouter(WIDTH, num_experts=4, top_k=2, dtype=F64)
    router.load_state_dict(_moe(4, 2, 2).gate.state_dict())
    # A rank's experts are filled as such, whoever dispatches to them.
    moe = MoE(router=whole.gate, dispatcher=LocalDispatcher(), experts=whole.experts)
    moe.gate, moe.experts = router, cut
    upcycle(dense, moe, granularity=2)
    for name, value in gather_whole(moe).items():
        assert torch.equal(value, gather_whole(whole)[name]), name
    assert cut.up_proj.shape[0] == 2 and dist.get_world_size() == 2


@pytest.mark.parametrize(
    ("moe", "granularity", "message"),
    [
        ({"top_k": 3}, 2, "granularity=2 must divide top_k: 3"),
        ({"experts": 5}, 2, "granularity=2 must divide num_experts: 5"),
        ({}, 0, "granularity=0 must be a whole number"),
        ({"ffn": 5}, 1, "ffn_size=5 must have 8 and 12"),
        ({"renormalize": False}, 1, "renormalize=False must be True"),
        ({"renormalize": 2.0}, 1, "renormalize=2.0 must be True"),
        ({"groups": GroupLimit(2, 1)}, 1, "groups="),
        ({"bias": True}, 1, "dense must have what the experts have"),
        ({"activation": "relu2"}, 1, "dense must have what the experts have"),
        ({"shared": torch.nn.Identity()}, 1, "shared_experts of moe must be None"),
        ({"capacity": Capacity(0.5)}, 1, "must be None: a token takes all parts"),
        ({"activation": "geglu"}, 1, "activation='geglu' of moe must be that of dense"),
        ({}, 2.0, "granularity=2.0 must be a whole number"),
    ],
)
def test_what_cannot_start_equal_is_refused(moe, granularity, message):
    options = {"experts": 4, "top_k": 2, "ffn": FFN, **moe}
    layer = _moe(options.pop("experts"), options.pop("top_k"), 1, **options)
    before = layer.gate.weight.clone()
    with pytest.raises(ValueError, match=message):
        upcycle(_dense(), layer, granularity=granularity)
    assert torch.equal(layer.gate.weight, before)


def test_an_old_selection_bias_does_not_part_what_ties():
    moe = _moe(8, 4, 2, score="sigmoid", selection_bias=True)
    moe.gate.e_score_correction_bias.copy_(torch.tensor([1.0, -1.0]).repeat(4))
    dense = _dense()
    upcycle(dense, moe, granularity=2)
    x = torch.randn(5, WIDTH, dtype=F64)
    torch.testing.assert_close(moe(x)[0], dense(x))


def test_other_routers_and_weights_of_inputs_are_refused():
    moe = _moe(4, 2, 1)
    moe.experts.weigh = "input"
    with pytest.raises(ValueError, match='weigh="input" must be'):
        upcycle(_dense(), moe)
    moe.gate = BalancedRouter(num_experts=4, top_k=2)
    with pytest.raises(ValueError, match="must be a TopKRouter"):
        upcycle(_dense(), moe)


def test_a_module_that_is_no_such_layer_is_refused():
    with pytest.raises(ValueError, match="dense must have a down_proj"):
        upcycle(torch.nn.Linear(2, 2), _moe(4, 2, 1))


def _dense(*, bias=False, tp=LOCAL):
    torch.manual_seed(7)
    dense = GatedMLP(WIDTH, FFN, bias=bias, tp=tp, dtype=F64)
    if bias:
        for layer in (dense.gate_proj, dense.up_proj, dense.down_proj):
            layer.bias.data.normal_()
    return dense


def _moe(experts, top_k, granularity, *, ffn=FFN, bias=False, activation="swiglu", **options):
    torch.manual_seed(0)
    shared = options.pop("shared", None)
    router = TopKRouter(WIDTH, num_experts=experts, top_k=top_k, dtype=F64, **options)
    grouped = GroupedExperts(
        experts, WIDTH, ffn // granularity, activation=activation, bias=bias, dtype=F64
    )
    return MoE(router=router, dispatcher=LocalDispatcher(), experts=grouped, shared=shared)
