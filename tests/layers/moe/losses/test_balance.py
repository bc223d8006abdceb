"""Balance and z losses have the published values, and those of one process in every layout."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from megablocks_core.groups import LOCAL, Mesh
from megablocks_core.layers.moe.losses import load_balance_loss, z_loss
from megablocks_core.layers.moe.routers import TopKRouter, route_top_k
from megablocks_core.parallel import recompute, reduce_gradients
from megablocks_core.testing import ranks

COLLAPSED = 1.9051483
A, B = ([[3.0, 0.0]] * 2, [[0.0, 3.0]] * 2)


def routed(*rows, top_k=1, **options):
    logits = torch.tensor([row for part in rows for row in part], dtype=torch.float64)
    return route_top_k(logits, top_k=top_k, renormalize=False, **options)


def test_f067_each_layer_has_its_own_loss():
    layers = [routed(A), routed(B)]
    losses = [load_balance_loss(layer).item() for layer in layers]
    assert_close(losses, [COLLAPSED] * 2, atol=1e-7, rtol=0)
    # What transformers computes over layers put end to end calls them balanced.
    joined = load_balancing_loss_func(tuple(layer.logits for layer in layers), 2, 1)
    assert_close(float(joined), 1.0, atol=1e-7, rtol=0)


def test_f068_each_sequence_of_a_pack_has_its_own_loss():
    pack = routed(A, B)
    for options in ({"sequence_length": 2}, {"cu_seqlens": torch.tensor([0, 2, 4])}):
        assert_close(load_balance_loss(pack, **options).item(), COLLAPSED, atol=1e-7, rtol=0)
    assert_close(load_balance_loss(pack).item(), 1.0)
    alone = [load_balance_loss(routed(part), reduction="sum") for part in (A, B)]
    assert_close(torch.stack(alone).sum().item() / 4, COLLAPSED, atol=1e-7, rtol=0)


def test_f070_perfect_balance_is_one_for_any_top_k():
    logits = torch.zeros(4, 4).double()
    choices = torch.tensor([[0, 1], [2, 3], [0, 1], [2, 3]])
    routing = route_top_k(logits, top_k=2, choices=choices)
    assert_close(load_balance_loss(routing).item(), 1.0)
    others = load_balancing_loss_func((logits,), 4, 2)
    assert_close(float(others), 2.0)  # not divided by top_k


def test_f073_z_loss_is_a_mean_over_tokens():
    for tokens in (1, 2, 7):
        routing = routed([[0.0] * 8] * tokens)
        assert_close(z_loss(routing).item(), math.log(8) ** 2)
        assert_close(z_loss(routing, reduction="sum").item(), tokens * math.log(8) ** 2)
    assert_close(z_loss(routed([[2.0, 1.0, 0.0, -1.0]])).item(), 5.9545258, atol=1e-7, rtol=0)


def test_f076_of_the_micro_batch_or_of_the_global_batch():
    first, second = routed(A), routed(B)
    for micro_batch in (first, second):
        assert_close(load_balance_loss(micro_batch).item(), COLLAPSED, atol=1e-7, rtol=0)
    assert_close(load_balance_loss(first + second).item(), 1.0)
    counts = first.tokens_per_expert + second.tokens_per_expert
    each = [
        load_balance_loss(part, tokens_per_expert=counts, reduction="sum")
        for part in (first, second)
    ]
    assert_close(torch.stack(each).sum().item() / 4, 1.0)


def test_f074_nothing_is_kept_between_steps():
    layers = [TopKRouter(6, num_experts=4, top_k=2) for _ in range(7)]
    x = torch.randn(5, 6)
    before = [set(vars(layer)) for layer in layers]
    for training in (True, False, True):
        terms = []
        for layer in layers:
            routing = recompute(layer.train(training), x)
            terms.append(load_balance_loss(routing))
        assert len(terms) == 7
        torch.stack(terms).sum().backward()
    assert [set(vars(layer)) for layer in layers] == before
    assert all(not list(layer.buffers()) for layer in layers)


def test_masked_tokens_count_nowhere():
    torch.manual_seed(0)
    logits, mask = torch.randn(12, 4).double(), torch.arange(12) % 4 > 0
    masked = route_top_k(logits, top_k=2, mask=mask)
    kept = route_top_k(logits[mask], top_k=2)
    assert_close(load_balance_loss(masked), load_balance_loss(kept))
    assert_close(z_loss(masked), z_loss(kept))
    by_sequence = load_balance_loss(masked, sequence_length=4)
    assert_close(by_sequence, load_balance_loss(kept, sequence_length=3))


def test_without_a_token_losses_and_gradients_are_zero():
    logits = torch.randn(3, 4, requires_grad=True)
    nobody = torch.zeros(3, dtype=torch.bool)
    for routing in (
        route_top_k(logits, top_k=2, mask=nobody),
        route_top_k(logits[:0], top_k=2),
    ):
        loss = load_balance_loss(routing) + z_loss(routing)
        loss = loss + load_balance_loss(routing, cu_seqlens=torch.tensor([0, len(routing.logits)]))
        assert loss == 0
        loss.backward()
        assert not logits.grad.any()


LAYOUTS = {1: [(1, False)], 2: [(1, False), (2, False), (2, True)], 4: [(2, True), (4, True)]}


@ranks(1, 2, 4)
def test_f072_router_gradients_are_those_of_one_process_in_every_layout():
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(1)).double()
    twin = router()
    whole = twin(x)
    (0.01 * load_balance_loss(whole) + 0.001 * z_loss(whole)).backward()
    for tp_size, cut in LAYOUTS[dist.get_world_size()]:
        mesh = Mesh(tp=tp_size)
        dp, tp = mesh.group("dp"), mesh.group("tp")
        holders = mesh.group("tp", "dp") if cut else dp
        for per_token in (True, False):
            part = router(tp if cut else LOCAL)
            routing = part(x.tensor_split(holders.size)[holders.rank])
            size = z_loss(routing, reduction="sum") / len(x)
            if not per_token:  # a mean over ranks of means over their tokens
                size = z_loss(routing) / holders.size
            loss = 0.01 * load_balance_loss(routing, group=holders) + 0.001 * size
            loss.backward()
            reduce_gradients(part, group=dp, reduction="sum")
            assert_close(part.weight.grad, twin.weight.grad, atol=1e-10, rtol=0)
        mesh.close()


@ranks(1, 2, 4)
def test_balance_over_the_global_batch_is_that_of_one_process():
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(1)).double()
    for tp_size, cut in LAYOUTS[dist.get_world_size()]:
        mesh = Mesh(tp=tp_size)
        dp, tp = mesh.group("dp"), mesh.group("tp")
        holders = mesh.group("tp", "dp") if cut else dp
        twin, part = router(), router(tp if cut else LOCAL)
        expected = load_balance_loss(twin(x))
        expected.backward()
        own = x.tensor_split(holders.size)[holders.rank]
        whole = sum_of(part(piece) for piece in own.split(2))
        loss = load_balance_loss(whole, group=holders)
        loss.backward()
        reduce_gradients(part, group=dp, reduction="sum")
        assert_close(loss, expected, atol=1e-12, rtol=0)
        assert_close(part.weight.grad, twin.weight.grad, atol=1e-10, rtol=0)
        mesh.close()


@ranks(2, 4)
def test_f068_sequences_may_be_cut_over_ranks():
    x = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(1)).double()
    tp = Mesh(tp=dist.get_world_size()).group("tp")
    twin, part = router(), router(tp)
    expected = load_balance_loss(twin(x.flatten(0, 1)), sequence_length=8)
    expected.backward()
    own = x.tensor_split(tp.size, dim=1)[tp.rank]
    loss = load_balance_loss(part(own.flatten(0, 1)), sequence_length=own.shape[1], group=tp)
    loss.backward()
    assert_close(loss, expected, atol=1e-12, rtol=0)
    assert_close(part.weight.grad, twin.weight.grad, atol=1e-10, rtol=0)


def sum_of(routings):
    whole, *others = routings
    for other in others:
        whole = whole + other
    return whole


def router(group=LOCAL):
    torch.manual_seed(0)
    return TopKRouter(6, num_experts=4, top_k=2, group=group, dtype=torch.float64)


def test_f075_stages_return_the_losses_of_their_own_layers():
    x = torch.randn(8, 6).double()
    layers = [router() for _ in range(4)]
    whole = torch.stack([load_balance_loss(layer(x)) for layer in layers])
    for stages in (1, 2, 4):
        cut = [layers[n * 4 // stages : (n + 1) * 4 // stages] for n in range(stages)]
        parts = [sum(load_balance_loss(layer(x)) for layer in stage) for stage in cut]
        assert_close(torch.stack(parts).sum(), whole.sum(), atol=1e-12, rtol=0)


def test_what_does_not_go_together_is_refused():
    routing = routed(A, B)
    for options, words in (
        ({"sequence_length": 3}, "sequence_length=3 must divide the 4 tokens"),
        ({"sequence_length": 2, "cu_seqlens": torch.tensor([0, 4])}, "not both"),
        ({"cu_seqlens": torch.tensor([0.0, 4.0])}, "must be integers"),
        ({"reduction": "none"}, "reduction='none'"),
        ({"tokens_per_expert": torch.zeros(3)}, "tokens_per_expert of shape"),
        ({"sequence_length": 2, "tokens_per_expert": torch.zeros(2)}, "must not come with"),
    ):
        with pytest.raises(ValueError, match=words):
            load_balance_loss(routing, **options)
    with pytest.raises(ValueError, match="reduction='max'"):
        z_loss(routing, reduction="max")
