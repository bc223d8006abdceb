"""A recomputed layer keeps its choices and splits: nothing hangs, and nothing counts twice."""

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from megablocks_core.groups import Mesh
from megablocks_core.layers import Decoder, DecoderSpec, MoESpec
from megablocks_core.layers.moe import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    GroupedExperts,
    Jitter,
    LocalDispatcher,
    MoE,
    TopKRouter,
    load_balance_loss,
)
from megablocks_core.parallel import DropoutKey, RecomputePolicy, recompute, recompute_modules
from megablocks_core.testing import ranks

F64 = torch.float64
WIDTH, EXPERTS = 8, 4
X = torch.randn(12, WIDTH, dtype=F64, generator=torch.Generator().manual_seed(2))


class _Unsteady(TopKRouter):
    """A router whose logits are another every time, by one unit in the last place."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls = 0

    def logits(self, x_TH, *, index=None):
        logits = super().logits(x_TH, index=index)
        self.calls += 1
        columns = torch.arange(EXPERTS) % 2 == self.calls % 2
        other = torch.nextafter(logits.detach(), torch.full_like(logits, torch.inf))
        return logits + torch.where(columns, other - logits.detach(), 0)


def _layer(dispatcher, *, router=TopKRouter, jitter=False, ties=False, chunks=1):
    torch.manual_seed(0)
    size = dist.get_world_size() if dist.is_initialized() else 1
    ep = Mesh(dp=size, ep=size).expert.group("ep")
    options = {"jitter": Jitter(0.3, stream="gate")} if jitter else {}
    gate = router(WIDTH, num_experts=EXPERTS, top_k=2, dtype=F64, **options)
    if ties:
        torch.nn.init.constant_(gate.weight, 3.0)
    own = {"num_experts": EXPERTS, "ep": ep}
    return MoE(
        router=gate,
        dispatcher=LocalDispatcher() if dispatcher is LocalDispatcher else dispatcher(**own),
        experts=GroupedExperts(EXPERTS, WIDTH, 6, ep=ep, dtype=F64),
        chunks=chunks,
    )


def test_a_unit_in_the_last_place_turns_choices():
    """What the tests below rest on: without memory the second run would choose others."""
    router = _layer(AllToAllDispatcher, router=_Unsteady, ties=True).gate
    first, second = (router(X).indices for _ in range(2))
    assert (first != second).any()


def _run(moe, call, index=None):
    """Output, gradients and counts of one step."""
    x = X.clone().requires_grad_()
    y, routing = call(moe, x, index)
    (y.sin().sum() + load_balance_loss(routing)).backward()
    gradients = {name: value.grad for name, value in moe.named_parameters()}
    return y.detach(), x.grad, gradients, routing.tokens_per_expert


def _plainly(moe, x, index):
    return moe(x, index=index)


def _again(moe, x, index):
    return recompute(lambda x: moe(x, index=index), x)


@ranks(1, 2)
@pytest.mark.parametrize("dispatcher", [AllToAllDispatcher, AllGatherDispatcher])
@pytest.mark.parametrize("case", ["unsteady", "unsteady and tied", "jitter", "chunks"])
def test_gradients_are_those_of_one_run(dispatcher, case):
    options = {
        "unsteady": {"router": _Unsteady},
        "unsteady and tied": {"router": _Unsteady, "ties": True},
        "jitter": {"jitter": True},
        "chunks": {"router": _Unsteady, "ties": True, "chunks": 3},
    }[case]
    rows = torch.zeros(len(X), dtype=torch.int64)
    index = DropoutKey(3, 4).index(rows, torch.arange(len(X))) if case == "jitter" else None
    expected = _run(_layer(dispatcher, **options), _plainly, index)
    found = _run(_layer(dispatcher, **options), _again, index)
    assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_f066_counts_are_those_of_one_run():
    """8 tokens, top 2, 3 steps: 16 a step with recomputation, and evaluation adds none."""
    moe = _layer(LocalDispatcher)
    x = X[:8].clone().requires_grad_()
    for recomputed in (True, False):
        total = 0
        for _ in range(3):
            y, routing = (_again if recomputed else _plainly)(moe, x, None)
            y.sum().backward()
            moe.eval()
            with torch.no_grad():
                moe(x)
            moe.train()
            total += int(routing.tokens_per_expert.sum())
            assert routing.tokens_per_expert.sum() == 16
        assert total == 48
    assert not list(moe.buffers())


@ranks(2)
@pytest.mark.parametrize(
    "modules", ["layers.*", "layers.*.mlp", RecomputePolicy("layers.*", keep=["messages"])]
)
def test_blocks_of_a_decoder_are_recomputed(modules):
    """Tensor-parallel and expert-parallel at once; losses and loads of layers come once."""
    spec = DecoderSpec(61, 16, 24, 2, 2, 2, 8, moe=MoESpec(4, 2, 12))
    tokens = torch.arange(12).view(2, 6) * 5
    results = []
    for policy in (None, modules):
        torch.manual_seed(0)
        decoder = Decoder(
            spec, mesh=Mesh(tp=2, ep=2), sequence_parallel=True, recompute=policy, dtype=F64
        )
        output = decoder(tokens, gather_logits=True)
        losses = [total / count for each in output.losses.values() for total, count in each]
        assert len(losses) == 4 and len(output.tokens_per_expert) == 2
        (output.logits.square().sum() + torch.stack(losses).sum()).backward()
        gradients = {name: value.grad for name, value in decoder.named_parameters()}
        results.append((output.logits.detach(), gradients, list(output.tokens_per_expert)))
    assert_close(results[1], results[0], rtol=0, atol=0)


@ranks(2)
def test_modules_of_a_layer_are_recomputed_by_name():
    expected = _run(_layer(AllToAllDispatcher), _plainly)
    moe = _layer(AllToAllDispatcher)
    assert recompute_modules(moe, ["gate", "experts"]) == ("gate", "experts")
    assert_close(_run(moe, _plainly), expected, rtol=0, atol=0)
