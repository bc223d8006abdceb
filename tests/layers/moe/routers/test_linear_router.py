"""Logits are float32 at least, of narrow tensors that alone are saved; buffers stay float32."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing import assert_close

from megablocks_core.groups import Mesh
from megablocks_core.layers.moe import QuantileRouter, TopKRouter
from megablocks_core.parallel import PrecisionPolicy, fully_shard, reset_parameters
from megablocks_core.testing import ranks

T, H, E = 12, 16, 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_narrow_tensors_give_float32_logits_and_their_gradients(dtype, bias):
    router = TopKRouter(H, num_experts=E, top_k=2, bias=bias, dtype=dtype)
    x = torch.randn(T, H).to(dtype).requires_grad_()
    saved = []
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        logits = router.logits(x)
    assert {each.dtype for each in saved} == {dtype}
    wide = [each.detach().float().requires_grad_() for each in (x, *router.parameters())]
    expected = wide[0] @ wide[1].T + (wide[2] if bias else 0)
    assert logits.dtype == torch.float32
    assert_close(logits, expected)
    slope = torch.randn(T, E)
    logits.backward(slope)
    expected.backward(slope)
    for ours, theirs in zip((x, *router.parameters()), wide, strict=True):
        assert ours.grad.dtype == dtype
        assert_close(ours.grad, theirs.grad.to(dtype))


def test_frozen_weights_and_inputs_get_no_gradient():
    router = TopKRouter(H, num_experts=E, top_k=2, dtype=torch.bfloat16)
    router(torch.randn(T, H).bfloat16()).weights.square().sum().backward()
    assert router.weight.grad is not None
    router.zero_grad()
    x = torch.randn(T, H).bfloat16().requires_grad_()
    router.requires_grad_(False)(x).weights.square().sum().backward()
    assert router.weight.grad is None and x.grad is not None


@pytest.mark.parametrize(
    "router",
    [
        TopKRouter(H, num_experts=E, top_k=2, bias=True, selection_bias=True),
        QuantileRouter(H, num_experts=E, top_k=2),
    ],
    ids=["top_k", "quantile"],
)
@pytest.mark.parametrize("convert", ["bfloat16", "half", "double"])
def test_buffers_stay_float32(router, convert):
    (buffer,) = router.buffers()
    buffer.copy_(torch.linspace(0, 1e-3, E))
    before = buffer.clone()
    getattr(nn.Sequential(router), convert)()
    assert router.weight.dtype != torch.float32
    assert torch.equal(next(router.buffers()), before)
    router.float()


def test_one_seed_is_one_router_from_meta_too():
    made = []
    for device in ("cpu", "meta"):
        router = TopKRouter(
            H, num_experts=E, top_k=2, bias=True, selection_bias=True, device=device
        )
        router.to_empty(device="cpu")
        reset_parameters(router, seed=5)
        made.append(router.state_dict())
    assert_close(*made)
    assert not made[0]["bias"].any() and not made[0]["e_score_correction_bias"].any()


@ranks(2)
def test_gradients_of_weight_and_bias_are_one_message():
    tp = Mesh(tp=2).group("tp")
    router = TopKRouter(H, num_experts=E, top_k=2, bias=True, group=tp)
    with CommDebugMode() as traffic:
        weights = router(torch.randn(T, H)).weights
        assert traffic.get_total_counts() == 0
        weights.square().sum().backward()
    assert traffic.get_total_counts() == 1


class Block(nn.Module):
    """A stand-in for what lies around a router; keeps what it was given."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(H, H)
        self.gate = TopKRouter(H, num_experts=E, top_k=2, score="sigmoid", selection_bias=True)

    def forward(self, x):
        x = self.up(x)
        self.met = (x, self.gate.e_score_correction_bias.dtype)
        self.routing = self.gate(x)
        return (x.float() * self.routing.weights.sum(-1, keepdim=True)).to(x.dtype)


@ranks(2)
def test_routing_is_equal_with_and_without_fully_shard_in_few_bits():
    group = Mesh(dp=2).group("dp")
    torch.manual_seed(0)
    block = Block()
    net = nn.Sequential(block)
    block.gate.e_score_correction_bias.copy_(torch.linspace(0, 1e-4, E))
    plain = TopKRouter(H, num_experts=E, top_k=2, score="sigmoid", selection_bias=True)
    plain.load_state_dict(block.gate.state_dict())
    policy = PrecisionPolicy(keep_float32=("gate.weight",))
    fully_shard(net, group=group, precision=policy)
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(dist.get_rank()))
    net(x).float().square().sum().backward()
    seen, dtype = block.met
    assert seen.dtype == torch.bfloat16 and dtype == torch.float32
    for ours, theirs in zip(block.routing[:5], plain(seen)[:5], strict=True):
        assert torch.equal(ours, theirs)
    assert block.gate.weight.grad is not None
    assert block.gate.weight.grad.dtype == torch.float32
