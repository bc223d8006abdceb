"""The layer is the sum that its parts say, holds nothing, and refuses parts that do not agree."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from megablocks_core.groups import LOCAL, Group, bind
from megablocks_core.layers import GatedMLP
from megablocks_core.layers.moe import MoE, ZeroComputationExperts
from megablocks_core.layers.moe.dispatch import LocalDispatcher
from megablocks_core.layers.moe.dispatch.assignment import take_rows
from megablocks_core.layers.moe.dispatch.dispatcher import Arrived
from megablocks_core.layers.moe.experts import GroupedExperts
from megablocks_core.layers.moe.routers import HashRouter, Jitter, TopKRouter

F64 = torch.float64
WIDTH, EXPERTS, TOP_K, FFN = 8, 4, 2, 6


def test_it_is_each_tokens_weighted_sum():
    moe, x = _layer(), _tokens()
    y, routing = moe(x)
    assert_close(y, _naive(moe, x, routing))
    assert y.shape == x.shape and routing.indices.shape == (10, TOP_K)


def test_words_of_tokens_and_choices_reach_the_router():
    experts = GroupedExperts(4, 6, 5)
    by_id = MoE(
        router=HashRouter(num_experts=4, top_k=2, stream="moe"),
        dispatcher=LocalDispatcher(),
        experts=experts,
    )
    x, ids = torch.randn(2, 3, 6), torch.arange(6).view(2, 3) % 3
    routing = by_id(x, index=ids)[1]
    assert torch.equal(routing.indices[:3], routing.indices[3:])
    jittered = TopKRouter(6, num_experts=4, top_k=2, jitter=Jitter(0.5, stream="moe"))
    layer = MoE(router=jittered, dispatcher=LocalDispatcher(), experts=experts)
    others = (layer(x, index=ids)[1].indices + 1) % 4
    routing = layer(x, index=ids, choices=others.view(2, 3, 2))[1]
    assert torch.equal(routing.indices, others)
    with pytest.raises(ValueError, match="index=None"):
        layer(x)


def test_shared_experts_are_added_and_gated():
    shared, gate = GatedMLP(WIDTH, 5, dtype=F64), nn.Linear(WIDTH, 1, bias=False, dtype=F64)
    x = _tokens()
    plain, routing = _layer()(x)
    assert_close(_layer(shared=shared)(x)[0], plain + shared(x))
    gated = _layer(shared=shared, shared_gate=gate)
    assert_close(gated(x)[0], plain + gate(x).sigmoid() * shared(x))
    names = {name for name, _ in gated.named_parameters()}
    assert {"gate.weight", "experts.up_proj", "shared_expert_gate.weight"} < names
    assert "shared_experts.gate_proj.weight" in names


def test_latent_experts_work_on_fewer_features_than_the_router_reads():
    down, up = (nn.Linear(*sizes, bias=False, dtype=F64) for sizes in ((WIDTH, 3), (3, WIDTH)))
    torch.manual_seed(0)
    router = TopKRouter(WIDTH, num_experts=EXPERTS, top_k=TOP_K, dtype=F64)
    experts = GroupedExperts(EXPERTS, 3, FFN, dtype=F64)
    parts = {"router": router, "dispatcher": LocalDispatcher(), "experts": experts}
    whole = MoE(**parts, latent_down=down, latent_up=up)
    x = _tokens()
    y, routing = whole(x)
    assert_close(routing.logits, x.flatten(0, -2) @ router.weight.T)
    assert_close(y, up(_naive(whole, down(x), routing)))


def test_shared_experts_are_computed_while_tokens_travel():
    events = []

    class Noting(LocalDispatcher):
        def start_dispatch(self, x, routing, *, chunks=1):
            halves = [slice(0, 4), slice(4, None)][:chunks]
            events.append(f"start {chunks}")

            class Piece(Arrived):
                def wait(self):
                    events.append("arrived")
                    return super().wait()

            return [Piece(self.dispatch(x[half], _rows(routing, half))) for half in halves]

        def start_combine(self, y, handle):
            events.append("return")
            return super().start_combine(y, handle)

        def finish_combine(self, pieces):
            events.append("finish")
            return torch.cat([piece.wait() for piece in pieces])

    shared = GatedMLP(WIDTH, 5, dtype=F64)
    shared.register_forward_hook(lambda *_: events.append("shared"))
    x = _tokens()
    moe = _layer(shared=shared, dispatcher=Noting(), chunks=2)
    assert_close(moe(x)[0], _layer(shared=shared)(x)[0])
    there = ["arrived", "return"]
    assert events == ["start 2", "shared", *there, *there, "finish", "shared"]


def test_a_mask_keeps_tokens_from_the_experts():
    moe, x = _layer(), _tokens()
    mask = torch.arange(10).view(2, 5) % 3 > 0
    y, routing = moe(x, mask=mask)
    assert not y[~mask].any()
    assert_close(y[mask], moe(x[mask])[0])
    assert routing.tokens_per_expert.sum() == TOP_K * mask.sum()


@pytest.mark.parametrize("shape", [(0, WIDTH), (WIDTH,), (2, 3, 4, WIDTH)])
def test_any_leading_shape_is_served(shape):
    y, routing = _layer()(torch.randn(shape, dtype=F64))
    assert y.shape == shape
    assert routing.indices.shape[0] == torch.Size(shape[:-1]).numel()


@pytest.mark.parametrize("top_k", [1, EXPERTS])
@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.bfloat16])
def test_any_dtype_and_number_of_choices(top_k, dtype):
    moe, x = _layer(top_k=top_k).to(dtype), _tokens(dtype)
    y, routing = moe(x)
    assert y.dtype == dtype
    y.float().sum().backward()
    assert all(weight.grad is not None for weight in moe.parameters())
    assert routing.weights.dtype == (F64 if dtype == F64 else torch.float32)


def test_one_expert_is_a_dense_layer():
    torch.manual_seed(0)
    moe = MoE(
        router=TopKRouter(WIDTH, num_experts=1, top_k=1, dtype=F64),
        dispatcher=LocalDispatcher(),
        experts=GroupedExperts(1, WIDTH, FFN, dtype=F64),
    )
    dense = GatedMLP(WIDTH, FFN, dtype=F64)
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(dense, name).weight.data.copy_(getattr(moe.experts, name)[0])
    x = _tokens()
    assert_close(moe(x)[0], dense(x))


def test_f074_nothing_is_held_and_calls_are_independent():
    """Seven calls of one layer, evaluation between them: seven routings, and state as before."""
    moe, xs = _layer(), [_tokens(seed=seed) for seed in range(7)]
    before = _state(moe)
    together = [moe(x) for x in xs]
    moe.eval()
    with torch.no_grad():
        moe(xs[0])
    moe.train()
    assert _state(moe) == before
    for x, (y, routing) in zip(xs, together, strict=True):
        alone, its = copy.deepcopy(moe)(x)
        assert torch.equal(y, alone)
        assert torch.equal(routing.tokens_per_expert, its.tokens_per_expert)
        assert routing.tokens_per_expert.sum() == 10 * TOP_K


def test_two_layers_and_one_used_twice_have_their_own_gradients():
    first, second = _layer(), _layer(seed=1)
    x = _tokens()
    inner, one = first(x)
    middle, two = first(inner)
    y, three = second(middle)
    losses = [routing.logits.square().sum() for routing in (one, two, three)]
    (y.sum() + sum(losses)).backward()
    twice = first.gate.weight.grad.clone()
    copies = copy.deepcopy(first), copy.deepcopy(first)
    for each in copies:
        each.zero_grad()
    inner, one = copies[0](x)
    middle, two = copies[1](inner)
    y, three = second(middle)
    (y.sum() + sum(r.logits.square().sum() for r in (one, two, three))).backward()
    assert_close(twice, sum(each.gate.weight.grad for each in copies))


class _Twice(nn.Module):
    def forward(self, dispatched):
        return dispatched.weights[:, None] * take_rows(dispatched.x, dispatched.rows) * 2


def test_an_unpickled_layer_finds_its_groups_again():
    """Those that only the dispatcher uses too."""
    group = Group((0, 1), rank=0)
    dispatcher = _dispatcher(tp=group, tokens="replicated", num_experts=EXPERTS)
    router = TopKRouter(WIDTH, num_experts=EXPERTS, top_k=TOP_K, dtype=F64)
    moe = MoE(router=router, dispatcher=dispatcher, experts=_Twice())
    again = pickle.loads(pickle.dumps(moe))
    assert again.tp is vars(again.dispatcher)["tp"] and again.tp is not group
    with pytest.raises(ValueError, match="must include the ranks"):
        bind(again, LOCAL)
    x = _tokens()
    assert torch.equal(again(x)[0], moe(x)[0])
    assert_close(again(x)[0], 2 * x)


def _parts(**options):
    return {
        "router": TopKRouter(WIDTH, num_experts=options.pop("routed", EXPERTS), top_k=TOP_K),
        "dispatcher": options.pop("dispatcher", LocalDispatcher()),
        "experts": GroupedExperts(EXPERTS, WIDTH, FFN, **options),
    }


def _dispatcher(**attributes):
    dispatcher = LocalDispatcher()
    vars(dispatcher).update(attributes)
    return dispatcher


@pytest.mark.parametrize(
    ("parts", "options", "message"),
    [
        ({"routed": 5}, {}, "router of num_experts=5 must have those of experts: 4"),
        (
            {"dispatcher": _dispatcher(num_experts=8)},
            {},
            "router of num_experts=4 must have those of dispatcher: 8",
        ),
        (
            {"routed": 6},
            {"zero_computation": ZeroComputationExperts(WIDTH, zero=1)},
            "num_experts=6 must have those of experts: 4 and 1 without computation",
        ),
        (
            {"dispatcher": _dispatcher(ep=Group((0, 1)), tp=LOCAL)},
            {},
            r"ep=Group\(ranks=\[0, 1\], rank=0\) of the dispatcher must be that of experts: LOCAL",
        ),
        (
            {"dispatcher": _dispatcher(tp=Group((0, 1)), tokens="sharded")},
            {},
            r"group=LOCAL of router must be Group\(ranks=\[0, 1\], rank=0\), .* tokens are sharded",
        ),
        ({}, {"shared_gate": nn.Linear(WIDTH, 1)}, "shared=None must be a module"),
        ({}, {"latent_up": nn.Linear(3, WIDTH)}, "must be given together"),
        ({}, {"chunks": 0}, "chunks=0 must be a whole number"),
        ({}, {"chunks": True}, "chunks=True must be a whole number"),
        ({"dispatcher": LocalDispatcher}, {}, "must be a Dispatcher"),
        (
            {},
            {"latent_down": nn.Linear(WIDTH, 3), "latent_up": nn.Linear(3, WIDTH)},
            "latent_down to 3 features must lead to those of experts: 8",
        ),
        (
            {},
            {"latent_down": nn.Linear(5, WIDTH), "latent_up": nn.Linear(WIDTH, 5)},
            "router of hidden_size=8 must read what experts do: 5",
        ),
    ],
)
def test_parts_that_do_not_agree_are_refused(parts, options, message):
    with pytest.raises(ValueError, match=message):
        MoE(**_parts(**parts), **options)


def _layer(*, seed=0, dispatcher=None, top_k=TOP_K, **options):
    torch.manual_seed(seed)
    return MoE(
        router=TopKRouter(WIDTH, num_experts=EXPERTS, top_k=top_k, dtype=F64),
        dispatcher=dispatcher or LocalDispatcher(),
        experts=GroupedExperts(EXPERTS, WIDTH, FFN, dtype=F64),
        **options,
    )


def _tokens(dtype=F64, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 5, WIDTH, dtype=F64, generator=generator).to(dtype)


def _rows(routing, rows):
    return routing._replace(indices=routing.indices[rows], weights=routing.weights[rows])


def _naive(moe, x, routing):
    rows = x.flatten(0, -2)
    total = torch.zeros_like(rows)
    experts = moe.experts
    for token, row in enumerate(rows):
        for expert, weight in zip(routing.indices[token], routing.weights[token], strict=True):
            hidden = nn.functional.silu(experts.gate_proj[expert] @ row)
            hidden = hidden * (experts.up_proj[expert] @ row)
            total[token] += weight * (experts.down_proj[expert] @ hidden)
    return total.view_as(x)


def _state(moe):
    parts = [*moe.modules(), moe.dispatcher]
    hidden = ("_parameters", "_buffers", "_modules")
    return [
        sorted((name, repr(value)) for name, value in vars(part).items() if name not in hidden)
        for part in parts
    ]
