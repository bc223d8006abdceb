"""Each token's experts are its best by score, on the published routers' terms."""

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from megablocks_core.groups import Mesh
from megablocks_core.layers.moe.routers import GroupLimit, TopKRouter, route_top_k
from megablocks_core.layers.moe.routing import NOWHERE
from megablocks_core.parallel import recompute
from megablocks_core.testing import ranks

T, H, E = 12, 6, 8
SCORES = {
    "softmax": lambda row: row.exp() / row.exp().sum(),
    "sigmoid": lambda row: 1 / (1 + (-row).exp()),
    "sqrtsoftplus": lambda row: (1 + row.exp()).log().sqrt(),
}


def naive(logits, *, top_k, score, renormalize, scale=1.0, groups=None, bias=None):
    """Token by token; indices and weights."""
    indices, weights = [], []
    for row in logits:
        scores = SCORES[score](row)
        ranked = scores if bias is None else scores + bias
        allowed = list(range(E))
        if groups is not None:
            size = E // groups.num_groups
            best = [
                sum(sorted(ranked[g * size : (g + 1) * size].tolist())[-groups.best :])
                for g in range(groups.num_groups)
            ]
            kept = sorted(range(len(best)), key=lambda g: -best[g])[: groups.top_k_groups]
            allowed = [e for e in allowed if e // size in kept]
        chosen = sorted(allowed, key=lambda e: (-ranked[e].item(), e))[:top_k]
        weight = scores[chosen]
        if renormalize is not False:
            weight = weight / (weight ** float(renormalize)).sum() ** (1 / float(renormalize))
        indices.append(chosen)
        weights.append(weight * scale)
    return torch.tensor(indices), torch.stack(weights)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1, "renormalize": False},
        {"top_k": 2, "renormalize": True},
        {"top_k": 3, "renormalize": 2.0, "scale": 2.5},
        {"top_k": 8, "renormalize": True},
        {"top_k": 2, "renormalize": True, "groups": GroupLimit(4, 2, best=2)},
        {"top_k": 4, "renormalize": False, "groups": GroupLimit(2, 1)},
        {"top_k": 2, "renormalize": True, "bias": torch.linspace(-1, 1, E).double()},
    ],
    ids=str,
)
def test_choices_weights_and_gradients_are_those_of_a_loop(score, options):
    logits, twin = (torch.randn(T, E).double().requires_grad_() for _ in range(2))
    with torch.no_grad():
        twin.copy_(logits)
    bias = options.get("bias")
    ours = {name: value for name, value in options.items() if name != "bias"}
    routing = route_top_k(logits, score=score, selection_bias=bias, **ours)
    indices, weights = naive(twin, score=score, **options)
    assert torch.equal(routing.indices, indices)
    assert_close(routing.weights, weights, atol=1e-12, rtol=0)
    assert torch.equal(routing.tokens_per_expert, indices.flatten().bincount(minlength=E))
    assert_close(routing.scores.sum(-1), torch.ones(T).double())
    slope = torch.randn_like(weights)
    (routing.weights * slope).sum().backward()
    (weights * slope).sum().backward()
    assert_close(logits.grad, twin.grad, atol=1e-12, rtol=0)


@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_ties_go_to_the_lowest_expert(top_k):
    for logits in (torch.zeros(5, E), torch.full((5, E), -torch.inf)):
        routing = route_top_k(logits, top_k=top_k, score="sigmoid")
        assert routing.indices.tolist() == [list(range(top_k))] * 5


def test_masked_tokens_go_nowhere_and_count_nowhere():
    mask = torch.arange(T) % 3 > 0
    logits = torch.randn(T, E, requires_grad=True)
    routing = route_top_k(logits, top_k=2, mask=mask)
    whole = route_top_k(logits[mask], top_k=2)
    assert (routing.indices[~mask] == NOWHERE).all() and not routing.weights[~mask].any()
    assert torch.equal(routing.indices[mask], whole.indices)
    assert torch.equal(routing.tokens_per_expert, whole.tokens_per_expert)
    assert not routing.scores[~mask].any() and routing.num_tokens == mask.sum()
    routing.weights.square().sum().backward()
    assert not logits.grad[~mask].any()


def test_no_token_is_no_trouble():
    routing = TopKRouter(H, num_experts=E, top_k=2)(torch.empty(0, H))
    assert routing.indices.shape == (0, 2) and routing.tokens_per_expert.tolist() == [0] * E


def test_choices_are_replayed_with_weights_of_now():
    router = TopKRouter(H, num_experts=E, top_k=2)
    x = torch.randn(T, H)
    kept = router(x).indices
    with torch.no_grad():
        router.weight.neg_()
    again = router(x, choices=kept)
    assert torch.equal(again.indices, kept)
    assert not torch.equal(router(x).indices, kept)
    assert_close(again.weights.sum(-1), torch.ones(T))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_are_float32_under_autocast_and_of_16_bit_weights(dtype):
    router = TopKRouter(H, num_experts=E, top_k=2, dtype=dtype)
    x = torch.randn(T, H).to(dtype)
    exact = (x.float() @ router.weight.float().T).softmax(-1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routing = router(x)
    assert routing.weights.dtype == routing.logits.dtype == torch.float32
    assert_close(routing.scores, exact)


@pytest.mark.parametrize("convert", ["bfloat16", "half", "double"])
def test_the_selection_bias_stays_float32(convert):
    router = TopKRouter(H, num_experts=E, top_k=2, selection_bias=True)
    router.e_score_correction_bias.copy_(torch.linspace(0, 1e-3, E))
    before = router.e_score_correction_bias.clone()
    getattr(router, convert)()
    assert router.weight.dtype != torch.float32
    assert torch.equal(router.e_score_correction_bias, before)
    router.to("meta").to_empty(device="cpu")
    assert router.e_score_correction_bias.dtype == torch.float32


@ranks(1, 2, 4)
def test_gradients_are_whole_where_ranks_hold_different_tokens():
    tp = Mesh(tp=dist.get_world_size()).group("tp")
    whole, cut = (
        _seeded(group=group, bias=True) for group in (Mesh(world_size=1, rank=0).group("tp"), tp)
    )
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(1)).double()
    slope = torch.randn(T, 2, generator=torch.Generator().manual_seed(2)).double()
    (whole(x).weights * slope).sum().backward()
    own = slice(tp.rank * T // tp.size, (tp.rank + 1) * T // tp.size)
    (cut(x[own]).weights * slope[own]).sum().backward()
    assert_close(cut.weight.grad, whole.weight.grad, atol=1e-12, rtol=0)
    assert_close(cut.bias.grad, whole.bias.grad, atol=1e-12, rtol=0)


def test_a_recomputed_region_does_not_route_again():
    router = _seeded()
    x = torch.zeros(T, H).double().requires_grad_()
    runs = []

    def block(x):
        nudge = 1e-9 if runs else 0.0  # other last bits in the second run flip every tie
        runs.append(router(x + nudge * torch.arange(H)))
        return runs[-1].weights.square().sum()

    recompute(block, x).backward()
    assert len(runs) == 2
    assert torch.equal(runs[0].indices, runs[1].indices)


@pytest.mark.parametrize("kind", ["recomputed", "evaluated in between", "without balance"])
def test_f066_every_step_counts_each_choice_once(kind):
    router = TopKRouter(H, num_experts=E, top_k=2, selection_bias=kind != "without balance")
    before = {name: value.clone() for name, value in router.state_dict().items()}
    x = torch.randn(8, H, requires_grad=True)
    for _ in range(3):
        counts = []

        def block(x, counts=counts):
            counts.append(router(x).tokens_per_expert)
            return router(x).weights.square().sum()

        (recompute(block, x) if kind == "recomputed" else block(x)).backward()
        if kind == "evaluated in between":
            with torch.no_grad():
                router.eval()(x)
            router.train()
        assert counts[0].sum() == 16
        assert all(torch.equal(each, counts[0]) for each in counts)
    assert_close(router.state_dict(), before)  # nothing in the router has counted


def test_weights_are_a_softmax_of_the_chosen_however_small_their_scores():
    logits = torch.tensor([[300.0, 0.0, 1.0, 2.0]], requires_grad=True)
    choices = torch.tensor([[3, 1]])
    routing = route_top_k(logits, top_k=2, choices=choices)
    assert_close(routing.weights, torch.tensor([[2.0, 0.0]]).softmax(-1))
    replayed = route_top_k(logits, top_k=2, choices=torch.tensor([[3, NOWHERE]]))
    assert replayed.weights.tolist() == [[1.0, 0.0]]
    far = torch.tensor([[300.0, 0.0, 1.0, 2.0]])
    assert route_top_k(far, top_k=3).indices.tolist() == [[0, 3, 2]]


@pytest.mark.parametrize(
    "options, words",
    [
        ({"top_k": 0}, "top_k=0 must be from 1 to num_experts=8"),
        ({"top_k": 9}, "top_k=9"),
        ({"top_k": 2.0}, "top_k=2.0 must be from 1 to num_experts=8"),
        ({"num_experts": 8.0}, "num_experts=8.0 must be"),
        ({"score": "relu"}, "score='relu' must be one of softmax"),
        ({"renormalize": -1.0}, "renormalize=-1.0"),
        ({"groups": GroupLimit(3, 1)}, "num_groups=3 must divide"),
        ({"groups": GroupLimit(8, 1)}, "top_k=2 must be at most 1"),
        ({"groups": GroupLimit(4, 2, best=3)}, "best=3 must be at most 2"),
        ({"groups": (4, 2)}, "groups=\\(4, 2\\) must be a GroupLimit"),
        ({"capacity": 1.25}, "capacity=1.25 must be a Capacity"),
        ({"jitter": 0.01}, "jitter=0.01 must be a Jitter"),
    ],
)
def test_what_cannot_be_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        TopKRouter(H, **{"num_experts": E, "top_k": 2, **options})


def test_shapes_are_checked():
    logits = torch.zeros(3, E)
    for name, wrong in {
        "mask": torch.ones(2, dtype=torch.bool),
        "choices": torch.zeros(3, 1, dtype=torch.int64),
        "selection_bias": torch.zeros(2),
    }.items():
        with pytest.raises(ValueError, match=f"{name} of shape"):
            route_top_k(logits, top_k=2, **{name: wrong})
    with pytest.raises(ValueError, match="True for a token that counts"):
        route_top_k(logits, top_k=2, mask=torch.ones(3))
    with pytest.raises(ValueError, match=r"must be \[T E\]"):
        route_top_k(logits[0], top_k=2)


@pytest.mark.parametrize(
    "record",
    [[[0, 0]], [[0, E]], [[1.0, 2.0]], [[True, False]]],
    ids=["twice", "E", "floats", "bools"],
)
def test_records_that_are_no_choices_are_refused(record):
    """A choice that stands twice would lose the gradient of one of the two."""
    with pytest.raises(ValueError, match="choices (of torch|must be below num_experts=8)"):
        route_top_k(torch.zeros(1, E), top_k=2, choices=torch.tensor(record))
    nowhere = route_top_k(torch.zeros(1, E), top_k=2, choices=torch.tensor([[-1, -1]]))
    assert not nowhere.weights.any() and not nowhere.tokens_per_expert.any()


def test_the_selection_bias_stays_float32_when_tensors_are_taken_as_they_come():
    """``load_state_dict(assign=True)`` from a checkpoint in bfloat16."""
    router = _seeded(selection_bias=True)
    state = {name: torch.ones_like(value).bfloat16() for name, value in router.state_dict().items()}
    router.load_state_dict(state, assign=True)
    assert router.weight.dtype == torch.bfloat16
    bias = router.e_score_correction_bias
    assert bias.dtype == torch.float32 and bias.eq(1).all()


def _seeded(**options):
    torch.manual_seed(0)
    return TopKRouter(H, num_experts=E, top_k=2, dtype=torch.float64, **options)
