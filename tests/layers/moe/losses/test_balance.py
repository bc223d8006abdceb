"""Balance and z losses have the published values, and those of one process in every layout."""

import itertools
import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
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


@ranks(1, 2)
def test_f068_the_value_is_the_same_in_every_layout():
    """Two sequences of two tokens: packed or rows, both at once or in turn, whole or over tp."""
    tp = Mesh(tp=dist.get_world_size()).group("tp")
    length = 2 // tp.size
    own = slice(tp.rank * length, (tp.rank + 1) * length)
    for batches in ([[A, B]], [[A], [B]]):
        for packed in (False, True):
            total = torch.zeros(())
            for sequences in batches:
                bounds = torch.arange(len(sequences) + 1) * length
                options = {"cu_seqlens": bounds} if packed else {"sequence_length": length}
                routing = routed(*(sequence[own] for sequence in sequences))
                total = total + load_balance_loss(routing, reduction="sum", group=tp, **options)
            assert_close(total.item() / 4, COLLAPSED, atol=1e-7, rtol=0)


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
        assert_close(z_loss(routing).item(), 4.3240771, atol=1e-7, rtol=0)
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


# Sizes of axes, and whether tokens lie over tp too. Routers know of ep by its ranks alone.
LAYOUTS = {
    1: [({}, False)],
    2: [({}, False), ({"tp": 2}, False), ({"tp": 2}, True), ({"cp": 2}, False)],
    4: [
        ({"ep": 4}, False),
        ({"tp": 2}, False),
        ({"tp": 2}, True),
        ({"tp": 4}, False),
        ({"tp": 4}, True),
        ({"tp": 2, "cp": 2}, True),
    ],
}


def layouts():
    """Ranks that hold different tokens, those of them that sum gradients, and their router."""
    for sizes, cut in LAYOUTS[dist.get_world_size()]:
        mesh = Mesh(**sizes)
        copies = mesh.group("dp", "cp")
        holders = mesh.group("tp", "dp", "cp") if cut else copies
        yield holders, copies, router(mesh.group("tp") if cut else LOCAL)
        mesh.close()


def tokens(count=24):
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(1)).double()


@pytest.mark.parametrize("per_token", [True, False])
@ranks(1, 2, 4)
def test_f072_router_gradients_are_those_of_one_process_in_every_layout(per_token):
    x, twin = tokens(), router()
    whole = twin(x)
    (0.01 * load_balance_loss(whole) + 0.001 * z_loss(whole)).backward()
    for holders, copies, part in layouts():
        routing = part(x.tensor_split(holders.size)[holders.rank])
        if per_token:
            balance, size = (
                loss(routing, reduction="sum", **options) / len(x)
                for loss, options in ((load_balance_loss, {"group": holders}), (z_loss, {}))
            )
        else:  # z: a mean over ranks of means over their tokens
            balance = load_balance_loss(routing, group=holders)
            size = z_loss(routing) / holders.size
        (0.01 * balance + 0.001 * size).backward()
        reduce_gradients(part, group=copies, reduction="sum")
        assert_close(part.weight.grad, twin.weight.grad, atol=1e-10, rtol=0)


@pytest.mark.parametrize("recomputed", [False, True])
@ranks(1, 2, 4)
def test_f076_global_balance_is_that_of_one_process_whatever_each_rank_holds(recomputed):
    x, twin = tokens(), router()
    expected = load_balance_loss(twin(x))
    expected.backward()
    for holders, copies, part in layouts():
        # The first of several ranks holds nothing, and no two the same number.
        cuts = [0, 5, 12][: holders.size - 1]
        pieces = x.tensor_split(cuts)[holders.rank].tensor_split(3)
        route = partial(recompute, part) if recomputed else part
        losses = [load_balance_loss(sum_of(route(piece) for piece in pieces), group=holders)]
        losses[0].backward()
        check(losses, expected, part, twin, copies)
        # One backward for each micro-batch, with counts of a first pass.
        with torch.no_grad():
            counts = sum_of(part(piece).tokens_per_expert for piece in pieces)
        counts = holders.all_reduce(counts)
        losses = []
        for piece in pieces:
            loss = load_balance_loss(route(piece), tokens_per_expert=counts, reduction="sum")
            losses.append(loss / len(x))
            losses[-1].backward()
        losses = [holders.all_reduce(torch.stack(losses).sum().detach())]
        check(losses, expected, part, twin, copies)


def check(losses, expected, part, twin, copies):
    reduce_gradients(part, group=copies, reduction="sum")
    assert_close(torch.stack(losses).sum(), expected, atol=1e-12, rtol=0)
    assert_close(part.weight.grad, twin.weight.grad, atol=1e-10, rtol=0)
    part.zero_grad()


@ranks(2, 4)
def test_f068_sequences_may_be_cut_over_ranks():
    x = tokens().view(3, 8, 6)
    tp = Mesh(tp=dist.get_world_size()).group("tp")
    twin, part = router(), router(tp)
    expected = load_balance_loss(twin(x.flatten(0, 1)), sequence_length=8)
    expected.backward()
    own = x.tensor_split(tp.size, dim=1)[tp.rank]
    loss = load_balance_loss(part(own.flatten(0, 1)), sequence_length=own.shape[1], group=tp)
    loss.backward()
    assert_close(loss, expected, atol=1e-12, rtol=0)
    assert_close(part.weight.grad, twin.weight.grad, atol=1e-10, rtol=0)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_f068_packed_sequences_have_the_gradients_of_unpacked_ones(micro_batches):
    x, bounds = tokens(), [0, 7, 9, 24]
    packed, unpacked, padded = router(), router(), router()
    expected = load_balance_loss(packed(x), cu_seqlens=torch.tensor(bounds))
    expected.backward()
    parts = [x[start:end] for start, end in itertools.pairwise(bounds)]
    for n in range(0, 3, 3 // micro_batches):
        some = parts[n : n + 3 // micro_batches]
        loss = sum_of(load_balance_loss(unpacked(part), reduction="sum") for part in some)
        (loss / len(x)).backward()
    # The same sequences beside each other, filled up with padding.
    filled = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=9.0)
    mask = torch.tensor([[t < len(part) for t in range(15)] for part in parts])
    loss = load_balance_loss(padded(filled.flatten(0, 1), mask=mask.flatten()), sequence_length=15)
    loss.backward()
    assert_close(loss, expected, atol=1e-12, rtol=0)
    for other in (unpacked, padded):
        assert_close(other.weight.grad, packed.weight.grad, atol=1e-12, rtol=0)


def sum_of(routings):
    whole, *others = routings
    for other in others:
        whole = whole + other
    return whole


def router(group=LOCAL):
    torch.manual_seed(0)
    return TopKRouter(6, num_experts=4, top_k=2, group=group, dtype=torch.float64)


def test_losses_read_nothing_on_the_host_and_compile_as_one_graph():
    def both(logits, mask, **options):
        routing = route_top_k(logits, top_k=2, mask=mask)
        return load_balance_loss(routing, **options) + z_loss(routing)

    for options in ({}, {"sequence_length": 4}, {"cu_seqlens": torch.tensor([0, 3, 12])}):
        with FakeTensorMode(allow_non_fake_inputs=True):
            logits = torch.randn(12, 4, requires_grad=True)
            both(logits, torch.ones(12, dtype=torch.bool), **options).backward()
        x, mask = torch.randn(12, 4), torch.arange(12) != 5
        compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
        assert_close(compiled(x, mask, **options), both(x, mask, **options))


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
