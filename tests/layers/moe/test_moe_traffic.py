"""What layers with experts send, counted, is what ``docs/traffic.md`` says.

Sizes are of whole tensors, with the share that stays: tokens are dealt out evenly.
"""

import pytest
import torch
import torch.distributed as dist

from megablocks_core.groups import LOCAL, Mesh
from megablocks_core.layers import Decoder, DecoderSpec, MoESpec
from megablocks_core.layers.moe import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    Capacity,
    GroupedExperts,
    MoE,
    TopKRouter,
    balanced_choices,
)
from megablocks_core.parallel import recompute
from megablocks_core.testing import ranks
from tests.traffic import Traffic

F64 = torch.float64
T, H, E, K, FACTS = 8, 16, 4, 2, 14  # seven numbers that ranks must have alike, and their negatives


@ranks(2, 4)
@pytest.mark.parametrize("chunks", [1, 2])
def test_all_to_all(chunks):
    p = dist.get_world_size()
    rows, weights, counts = T * K * H // chunks, T * K // chunks, p * (chunks * E // p + 1)
    there = chunks * [weights, rows, rows]
    forward, backward, more = _sent(AllToAllDispatcher, Mesh(dp=p, ep=p), chunks=chunks)
    assert forward == {"all_reduce": [FACTS], "all_to_all": sorted([counts, *there])}
    assert backward == {"all_to_all": sorted(there)}
    # All of forward again but facts, counts and the way back of the last piece.
    again = chunks * [weights, rows] + (chunks - 1) * [rows]
    assert more == {"all_to_all": sorted([*there, *again])}


@ranks(2, 4)
def test_all_to_all_with_a_capacity():
    """As many rows as places: here twice those that are filled."""
    p = dist.get_world_size()
    rows, weights = 2 * T * K * H, 2 * T * K
    forward, backward, _ = _sent(AllToAllDispatcher, Mesh(dp=p, ep=p), capacity=Capacity(2.0))
    assert forward == {"all_reduce": [FACTS], "all_to_all": sorted([p + E, weights, rows, rows])}
    assert backward == {"all_to_all": [weights, rows, rows]}


@ranks(4)
def test_features_of_experts_over_ranks():
    q, p, rows, weights = 2, 2, T * K * H, T * K
    forward, backward, _ = _sent(AllToAllDispatcher, Mesh(dp=4, ep=p, etp=q))
    numbers = p * (E // p + 1)
    assert forward == {
        "all_reduce": [FACTS, FACTS],
        "all_to_all": [numbers, weights, rows, rows],
        "all_gather": [q * numbers, q * weights, q * rows],
        "reduce_scatter": [q * rows],
    }
    assert backward == {
        "all_to_all": [weights, rows, rows],
        "all_gather": [q * rows],
        "reduce_scatter": [q * weights, q * rows],
    }


@ranks(2, 4)
@pytest.mark.parametrize("capacity", [None, Capacity(2.0)])
def test_all_gather(capacity):
    p = dist.get_world_size()
    forward, backward, _ = _sent(AllGatherDispatcher, Mesh(dp=p, ep=p), capacity=capacity)
    assert forward == {
        "all_reduce": [FACTS],
        "all_gather": sorted([p * (E + 2), p * T * K, p * T * K, p * T * H]),
        "reduce_scatter": [p * T * H],
    }
    assert backward == {"all_gather": [p * T * H], "reduce_scatter": [p * T * K, p * T * H]}


@ranks(2)
def test_replicated_tokens():
    """Each rank sends its half; results, and gradients of tokens and weights, are gathered."""
    rows, weights = T * K * H // 2, T * K // 2
    forward, backward, _ = _sent(AllToAllDispatcher, Mesh(tp=2, ep=2), tokens="replicated")
    assert forward == {
        "all_reduce": [FACTS],
        "all_to_all": [2 * (E // 2 + 1), weights, rows, rows],
        "all_gather": [T * H],
    }
    assert backward == {"all_to_all": [weights, rows, rows], "all_gather": [T * K, T * H]}


@ranks(2)
@pytest.mark.parametrize("recomputed", [False, True])
def test_a_decoder_under_sequence_parallelism(recomputed):
    """L blocks of attention and experts; the losses' sums over ranks; one message a router."""
    layers, large = 2, T * H
    spec = DecoderSpec(61, H, 24, layers, 2, 2, 8, moe=MoESpec(E, K, 12))
    decoder = Decoder(
        spec,
        mesh=Mesh(tp=2, ep=2),
        sequence_parallel=True,
        recompute="layers.*" if recomputed else None,
        dtype=F64,
    )
    with Traffic() as forward:
        output = decoder(torch.arange(T).view(1, T))
        losses = [total for each in output.losses.values() for total, _ in each]
    with Traffic() as backward:
        (output.logits.sum() + torch.stack(losses).sum()).backward()
    sent, back = forward.sorted_sizes(), backward.sorted_sizes()
    assert sent["all_gather"] == sent["reduce_scatter"] == (layers + 1) * [large]
    assert sent["all_reduce"] == sorted([layers, *layers * [E, E + 1, FACTS]])
    more = layers if recomputed else 0
    assert back["all_gather"] == (2 * layers + 2 + more) * [large]
    assert back["reduce_scatter"] == (layers + 1 + more) * [large]
    assert back["all_reduce"] == sorted([H, *layers * [2 * H, E * H]])
    assert (len(sent["all_to_all"]), len(back["all_to_all"])) == (4 * layers, 3 * layers + 2 * more)


def _sent(kind, mesh, *, capacity=None, tokens="sharded", chunks=1):
    """Messages of forward, of backward, and of backward of a recomputed layer."""
    ep, etp = (mesh.expert.group(axis) for axis in ("ep", "etp"))
    tp = mesh.group("tp") if tokens == "replicated" else LOCAL
    moe = MoE(
        router=TopKRouter(H, num_experts=E, top_k=K, capacity=capacity, dtype=F64),
        dispatcher=kind(num_experts=E, ep=ep, etp=etp, tp=tp, tokens=tokens),
        experts=GroupedExperts(E, H, 6, ep=ep, etp=etp, dtype=F64),
        chunks=chunks,
    )
    choices = balanced_choices(T, num_experts=E, top_k=K)
    sizes = []
    for call in (moe, lambda x, choices: recompute(lambda x: moe(x, choices=choices), x)):
        x = torch.randn(T, H, dtype=F64, requires_grad=True)
        with Traffic() as forward:
            y, _ = call(x, choices=choices)
        with Traffic() as backward:
            y.sum().backward()
        sizes += [forward.sorted_sizes(), backward.sorted_sizes()]
    assert sizes[2] == sizes[0]
    return sizes[0], sizes[1], sizes[3]
