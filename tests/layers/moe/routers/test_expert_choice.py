"""Each expert takes its best tokens, of all ranks whose tokens compete."""

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from megablocks_core.groups import LOCAL, Mesh
from megablocks_core.layers.moe import ExpertChoiceRouter, route_expert_choice
from megablocks_core.layers.moe.routing import NOWHERE
from megablocks_core.testing import ranks

T, H, E = 12, 6, 4


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("factor, places", [(1.0, 3), (2.0, 6), (0.1, 1), (4.0, 12)])
@pytest.mark.parametrize("ties", [False, True])
def test_choices_weights_and_gradients_are_those_of_a_loop(score, factor, places, ties):
    logits = (torch.randint(0, 2, (T, E)) if ties else torch.randn(T, E)).double()
    logits.requires_grad_()
    routing = route_expert_choice(logits, capacity_factor=factor, score=score)
    twin = logits.detach().clone().requires_grad_()
    scores = twin.softmax(-1) if score == "softmax" else twin.sigmoid()
    weights = torch.zeros(T, E).double()
    for expert in range(E):
        best = sorted(range(T), key=lambda t: (-scores[t, expert].item(), t))[:places]
        assert (routing.indices[:, expert] == expert).nonzero().flatten().tolist() == sorted(best)
        kept = torch.zeros(T).double()
        kept[best] = 1
        weights = torch.cat(
            [weights[:, :expert], (scores[:, expert] * kept)[:, None], weights[:, expert + 1 :]], 1
        )
    assert_close(routing.weights, weights, atol=1e-12, rtol=0)
    assert routing.tokens_per_expert.tolist() == [places] * E and routing.capacity == places
    assert ((routing.indices == NOWHERE) | (routing.indices == torch.arange(E))).all()
    slope = torch.randn(T, E).double()
    (routing.weights * slope).sum().backward()
    (weights * slope).sum().backward()
    assert_close(logits.grad, twin.grad, atol=1e-12, rtol=0)


def test_tokens_that_do_not_count_are_not_taken():
    mask = torch.arange(T) > 9
    routing = route_expert_choice(torch.randn(T, E), capacity_factor=2.0, mask=mask)
    assert (routing.indices[~mask] == NOWHERE).all() and not routing.scores[~mask].any()
    assert routing.tokens_per_expert.tolist() == [1] * E  # two tokens, two experts each


@pytest.mark.parametrize("factor", [0.6, 1.0, 2.0, 4.0])
def test_pads_change_no_choice(factor):
    """Five tokens between pads choose as five alone, in as many places as all could fill."""
    logits, mask = torch.randn(T, E), torch.arange(T) % 5 > 2
    mask[0] = True
    padded = route_expert_choice(logits, capacity_factor=factor, mask=mask)
    alone = route_expert_choice(logits[mask], capacity_factor=factor)
    assert torch.equal(padded.indices[mask], alone.indices)
    assert torch.equal(padded.tokens_per_expert, alone.tokens_per_expert)
    assert (padded.capacity or 0) >= (alone.capacity or 0)


def test_no_token_is_no_trouble():
    routing = ExpertChoiceRouter(H, num_experts=E, capacity_factor=2.0)(torch.empty(0, H))
    assert routing.indices.shape == (0, E) and routing.tokens_per_expert.tolist() == [0] * E


@ranks(2, 4)
def test_ranks_choose_as_one_does():
    world = Mesh(tp=dist.get_world_size()).group("tp")
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(1)).double()
    mask = torch.arange(T) != 2
    starts = [0, 1, 7, 7, T] if world.size == 4 else [0, 5, T]  # one rank of four has no token
    own = slice(starts[world.rank], starts[world.rank + 1])
    slope = torch.randn(T, E, generator=torch.Generator().manual_seed(2)).double()

    whole, cut, wider = (
        _seeded(group=LOCAL),
        _seeded(group=world),
        _seeded(group=LOCAL, choose_over=world),
    )
    one, part = whole(x, mask=mask), cut(x[own], mask=mask[own])
    assert torch.equal(part.indices, one.indices[own])
    assert torch.equal(wider(x[own], mask=mask[own]).indices, one.indices[own])
    assert torch.equal(world.all_reduce(part.tokens_per_expert), one.tokens_per_expert)
    (one.weights * slope).sum().backward()
    (part.weights * slope[own]).sum().backward()
    assert_close(cut.weight.grad, whole.weight.grad, atol=1e-12, rtol=0)


@ranks(2)
def test_rivals_must_include_the_group():
    mesh = Mesh(tp=2)
    alone = Mesh(world_size=2, rank=dist.get_rank(), dp=2).group("tp")
    assert alone.size == 1
    router = ExpertChoiceRouter(
        H, num_experts=E, capacity_factor=1.0, group=mesh.group("tp"), choose_over=alone
    )
    assert router.choose_over.size == 2


def test_wrong_options_are_refused():
    for factor in (0.0, 4.5):
        with pytest.raises(ValueError, match=f"capacity_factor={factor}"):
            ExpertChoiceRouter(H, num_experts=E, capacity_factor=factor)
    with pytest.raises(ValueError, match="score='relu'"):
        ExpertChoiceRouter(H, num_experts=E, capacity_factor=1.0, score="relu")  # pyright: ignore
    with pytest.raises(ValueError, match="score='relu'"):
        route_expert_choice(torch.zeros(T, E), capacity_factor=1.0, score="relu")  # pyright: ignore
    with pytest.raises(ValueError, match="factor=-1"):
        route_expert_choice(torch.zeros(T, E), capacity_factor=-1)
    with pytest.raises(ValueError, match="mask of shape"):
        route_expert_choice(torch.zeros(T, E), capacity_factor=1.0, mask=torch.ones(3) > 0)


def _seeded(**options):
    torch.manual_seed(0)
    return ExpertChoiceRouter(H, num_experts=E, capacity_factor=1.5, dtype=torch.float64, **options)
