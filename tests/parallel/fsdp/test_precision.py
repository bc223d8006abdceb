"""Who computes and who reduces in how many bits."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

from megablocks_core.groups import Mesh, ShardSpec, mark
from megablocks_core.parallel import PrecisionPolicy, fully_shard, no_sync
from megablocks_core.parallel.fsdp.precision import dtypes_of, widen_kept
from megablocks_core.testing import ranks

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
KEEP = PrecisionPolicy(keep_float32=("router.*", "decay", "level"))


class Router(nn.Module):
    """A stand-in: scores in float32."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))
        self.register_buffer("level", torch.randn(4))

    def forward(self, x):
        return (x.float() @ self.weight.T + self.level).softmax(-1).to(x.dtype)


class Block(nn.Module):
    """A router, a decay, and products in few bits; takes down the dtypes that it meets."""

    def __init__(self):
        super().__init__()
        self.router = Router()
        self.decay = nn.Parameter(torch.randn(8))
        self.up = nn.Linear(8, 4)
        self.down = nn.Linear(4, 8)
        self.register_buffer("shift", torch.ones(8))
        self.met = {}

    def forward(self, x):
        tensors = [*self.named_parameters(), *self.named_buffers(), ("x", x)]
        self.met = {name: tensor.dtype for name, tensor in tensors}
        y = self.down(self.up(x) * self.router(x))
        return x + (y.float() * self.decay.sigmoid()).to(x.dtype)


class Net(nn.Module):
    """Two blocks."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def in_bf16(net, x):
    """The gradients of one process that computes as the policy says, in float32."""
    parameters = {
        name: p.detach().to(F32 if "router" in name or "decay" in name else BF16).requires_grad_()
        for name, p in net.named_parameters()
    }
    functional_call(net, parameters, (x.to(BF16),)).float().square().sum().backward()
    return {name: parameter.grad.float() for name, parameter in parameters.items()}


@ranks(2)
def test_patterns_stay_float32_and_reduced_gradients_are_the_float32_mean():
    group = Mesh().group("dp")
    torch.manual_seed(0)
    net: Any = Net()
    twin = Net()
    twin.load_state_dict(net.state_dict())
    fully_shard(net, group=group, precision=KEEP)
    xs = torch.randn(2, 3, 8)
    net(xs[group.rank]).float().square().sum().backward()
    met = net.layers[0].met
    assert {name for name, dtype in met.items() if dtype == F32} == {
        "router.weight",
        "router.level",
        "decay",
        "shift",
    }
    assert met["x"] == met["up.weight"] == BF16
    wanted = [in_bf16(twin, x) for x in xs]
    for name, parameter in net.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == F32
        mean = (wanted[0][name] + wanted[1][name]) / 2
        assert torch.equal(parameter.grad.full_tensor(), mean), name


@ranks(2)
def test_micro_batches_are_summed_in_float32_whichever_parameter_each_used():
    """The sum of 64 has the error of one: no bit is lost between micro-batches."""
    group = Mesh().group("dp")
    torch.manual_seed(0)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Parameter(torch.ones(300)) for _ in range(3))

        def forward(self, x, name):
            return (getattr(self, name) * x).sum()

    net: Any = fully_shard(Two(), group=group, precision=PrecisionPolicy())
    xs = torch.rand(64, 2, 300).to(BF16)
    for micro, pair in enumerate(xs):
        name = "ab"[micro % 2] if micro < 63 else "b"
        if micro < 63:
            with no_sync(net):
                net(pair[group.rank], name).backward()
        else:
            net(pair[group.rank], name).backward()
    exact = xs.double().sum(1) / 2
    for name, picked in (("a", exact[0:63:2]), ("b", exact[1::2])):
        found = getattr(net, name).grad.full_tensor()
        torch.testing.assert_close(found.double(), picked.sum(0), rtol=1e-6, atol=0)
    assert net.c.grad is None


@ranks(2, 4)
def test_gradients_of_16_bit_parameters_are_reduced_in_float32():
    _assert_rounded_once()


@pytest.mark.slow
@ranks(8)
def test_gradients_of_16_bit_parameters_are_reduced_in_float32_over_eight_ranks():
    _assert_rounded_once()


def _assert_rounded_once():
    """Over ranks and micro-batches together."""
    group = Mesh().group("dp")
    net: Any = fully_shard(nn.Linear(50, 40, bias=False).bfloat16(), group=group)
    torch.manual_seed(1)
    xs = torch.randn(5, group.size, 1, 50).to(BF16)
    for x in xs[1:]:
        with no_sync(net):
            net(x[group.rank]).sum().backward()
    net(xs[0][group.rank]).sum().backward()
    mean = xs.double().sum(0).mean(0).expand(40, 50)
    gradient = net.weight.grad.full_tensor()
    assert gradient.dtype == BF16
    error = (gradient.double() - mean).abs() / mean.abs()
    assert error.max() < 2.0**-8  # half a step of bfloat16, whatever the number of ranks


@ranks(2)
def test_outputs_and_inputs_of_the_whole_module_are_cast():
    group = Mesh().group("dp")
    policy = PrecisionPolicy(outputs=F64)
    net = fully_shard(nn.Linear(4, 2), group=group, precision=policy)
    assert net(torch.ones(4)).dtype == F64
    bare = fully_shard(nn.Linear(4, 2), group=group, precision=PrecisionPolicy(cast_inputs=False))
    with pytest.raises(RuntimeError, match="dtype"):
        bare(torch.ones(4))


@ranks(2)
def test_experts_that_lie_on_one_rank_are_used_in_the_same_dtype():
    mesh = Mesh(ep=2)
    seen = []

    class Expert(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, 4))
            mark(self, "weight", ShardSpec(0, mesh.expert.group("ep")), expert=True)

        def forward(self, x):
            seen.append(self.weight.dtype)
            if x.sum() == 0:
                raise ArithmeticError
            return x * self.weight

    group = mesh.group("dp")
    net = nn.Sequential(nn.Linear(4, 4), Expert())
    fully_shard(net, group=group, precision=PrecisionPolicy())
    net(torch.ones(1, 4)).float().sum().backward()
    expert = net[1].weight
    assert seen == [BF16]
    assert isinstance(expert, nn.Parameter) and expert.dtype == expert.grad.dtype == F32
    with pytest.raises(ArithmeticError):
        net[1](torch.zeros(4))
    assert net[1].weight is expert


def test_dtypes():
    def dtypes(own, kept=False, **options):
        return dtypes_of(torch.ones(1, dtype=own), PrecisionPolicy(**options), kept=kept)

    assert dtypes(F32) == (BF16, F32)
    assert dtypes(F32, kept=True) == (F32, F32)
    assert dtypes(F32, reduce=BF16) == (BF16, BF16)
    assert dtypes(BF16, params=None) == (BF16, F32)
    assert dtypes(F64, params=None) == (F64, F64)
    assert dtypes(torch.int64) == (torch.int64, torch.int64)


def test_what_is_kept_becomes_float32():
    net = Net().bfloat16()
    kept = widen_kept(net, KEEP)
    assert kept == {
        id(p) for name, p in net.named_parameters() if "router" in name or "decay" in name
    }
    wide = {name for name, tensor in net.state_dict().items() if tensor.dtype == F32}
    assert wide == {
        f"layers.{n}.{name}" for n in (0, 1) for name in ("router.weight", "router.level", "decay")
    }


def test_patterns_that_match_nothing_are_refused():
    with pytest.raises(ValueError, match=r"no parameter's or buffer's name matches \['gate'\]"):
        widen_kept(Net(), PrecisionPolicy(keep_float32=("decay", "gate")))
