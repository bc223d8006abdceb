"""Decays and step sizes stay float32 whatever a model is converted to or wrapped in."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from megablocks_core.groups import Mesh
from megablocks_core.layers.ssm.mixers.float32 import Float32Parameters, wide_dtype
from megablocks_core.parallel import DataParallel, PrecisionPolicy, ShardedOptimizer, fully_shard
from megablocks_core.testing import ranks
from tests.layers.ssm.mixers.kinds import HIDDEN, KINDS, build, loss, tokens

BF16 = torch.bfloat16
KEPT = {
    "Mamba1": {"A_log", "D", "dt_proj.bias"},
    "Mamba2": {"A_log", "D", "dt_bias"},
    "GatedDeltaNet": {"A_log", "dt_bias"},
}
each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kind
def test_conversions_leave_them_as_they_are(kind):
    mixer = build(kind)
    before = {name: p.detach().clone() for name, p in mixer.named_parameters()}
    for converted in (mixer.to(BF16), mixer.half(), mixer.bfloat16(), build(kind, dtype=BF16)):
        wide = {name for name, p in converted.named_parameters() if p.dtype == torch.float32}
        assert wide == KEPT[kind]
    for name in KEPT[kind]:
        assert torch.equal(mixer.get_parameter(name), before[name])


@each_kind
def test_they_can_become_wider_and_leave_meta(kind):
    assert {p.dtype for p in build(kind).double().parameters()} == {torch.float64}
    from_meta = build(kind, device="meta").to(BF16).to_empty(device="cpu")
    for name, parameter in from_meta.named_parameters():
        assert parameter.device.type == "cpu"
        assert parameter.dtype == (torch.float32 if name in KEPT[kind] else BF16)


@each_kind
def test_tensors_put_in_their_place_are_widened(kind):
    given = {name: tensor.to(BF16) for name, tensor in build(kind).state_dict().items()}
    mixer = build(kind, device="meta")
    mixer.load_state_dict(given, assign=True)
    for name, parameter in mixer.named_parameters():
        assert parameter.dtype == (torch.float32 if name in KEPT[kind] else BF16)
        assert_close(parameter, given[name], check_dtype=False, rtol=0, atol=0)
        assert isinstance(parameter, nn.Parameter) and parameter.requires_grad
    assert given["A_log"].dtype == BF16


@each_kind
def test_a_mixer_in_bf16_decays_as_one_in_float32(kind):
    """A rounded decay would show after some tokens; weights and products are bf16 in both."""
    torch.manual_seed(0)
    mixer = build(kind)
    x_TH = tokens(40, HIDDEN, dtype=BF16)
    rounded = build(kind)
    rounded.load_state_dict({name: p.to(BF16).float() for name, p in mixer.state_dict().items()})
    for name in KEPT[kind]:
        rounded.get_parameter(name).data = mixer.get_parameter(name).data
    with torch.autocast("cpu", dtype=BF16):
        autocast = rounded(x_TH.float())
    assert_close(mixer.to(BF16)(x_TH).float(), autocast.float(), rtol=0.02, atol=0.01)


@each_kind
def test_scans_see_float32_decays_under_autocast(kind):
    seen = []

    def scan(x, *others, **options):
        assert not torch.is_autocast_enabled("cpu")
        seen.extend(part.dtype for part in (*others, options.get("D")) if part is not None)
        return x[..., : HIDDEN if kind == "Mamba2" else None], None

    def delta(q, k, v, g, beta, **options):
        seen.extend((g.dtype, beta.dtype))
        return v, None

    mixer = build(kind, scan=delta if kind == "GatedDeltaNet" else scan)
    with torch.autocast("cpu", dtype=BF16):
        mixer(tokens(4, HIDDEN, dtype=torch.float32))
    wide = {"Mamba1": 3, "Mamba2": 3, "GatedDeltaNet": 2}
    assert seen.count(torch.float32) == wide[kind]


@each_kind
@ranks(2)
def test_fully_shard_in_bf16_has_the_decays_of_one_process(kind):
    group = Mesh().group("dp")
    torch.manual_seed(0)
    stack = nn.ModuleList(build(kind) for _ in range(2))
    net, twin = _Stack(stack), _Stack(nn.ModuleList(build(kind) for _ in range(2)))
    twin.load_state_dict(net.state_dict())
    twin.to(BF16)
    x_TH = tokens(6, HIDDEN, dtype=BF16)

    fully_shard(net, group=group, precision=PrecisionPolicy())
    y_TH, expected = net(x_TH), twin(x_TH)

    assert net.met == twin.met
    assert {name for name, dtype in net.met.items() if dtype == torch.float32} == {
        f"layers.{layer}.{name}" for layer in range(2) for name in KEPT[kind]
    }
    assert torch.equal(y_TH, expected)
    for y in (y_TH, expected):
        loss(y.float()).backward()
    theirs = dict(twin.named_parameters())
    for name, parameter in net.named_parameters():
        expected = theirs[name].grad.float()
        gradient: Any = parameter.grad
        error = gradient.full_tensor().float() - expected
        assert error.norm() <= 0.02 * expected.norm(), name


@each_kind
@ranks(2)
def test_data_parallel_reduces_mixed_dtypes(kind):
    torch.manual_seed(0)
    twin = build(kind).to(BF16)
    torch.manual_seed(0)
    net = DataParallel(build(kind).to(BF16), group=Mesh().group("dp"))
    x_TH = tokens(6, HIDDEN, dtype=BF16)
    for mixer in (net, twin):
        loss(mixer(x_TH).float()).backward()
    for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        assert ours.dtype == theirs.dtype
        assert_close(ours.grad, theirs.grad, check_dtype=False, rtol=0.02, atol=1e-3)


@each_kind
@ranks(2)
def test_a_sharded_optimizer_steps_mixed_dtypes_as_one_process_does(kind):
    torch.manual_seed(0)
    twin = build(kind).to(BF16)
    torch.manual_seed(0)
    net = build(kind).to(BF16)
    ours = ShardedOptimizer(net, torch.optim.SGD, group=Mesh().group("dp"), lr=0.1)
    theirs = torch.optim.SGD(twin.parameters(), lr=0.1)
    for mixer, optimizer in ((net, ours), (twin, theirs)):
        loss(mixer(tokens(6, HIDDEN, dtype=BF16)).float()).backward()
        optimizer.step()
    for mine, other in zip(net.parameters(), twin.parameters(), strict=True):
        assert mine.dtype == other.dtype
        assert_close(mine, other, rtol=0.02, atol=1e-3)


def test_only_named_parameters_are_kept():
    class Outer(Float32Parameters):
        keep_float32 = ("decay",)

        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.decay, self.other = (nn.Parameter(torch.zeros(2)) for _ in range(2))

    outer = Outer()
    outer.decay.grad = torch.ones(2)
    outer.to(BF16)
    assert {name for name, p in outer.named_parameters() if p.dtype == BF16} == {
        "inner.weight",
        "inner.bias",
        "other",
    }
    assert outer.decay.grad.dtype == torch.float32


def test_wide_dtype():
    assert wide_dtype(None) == wide_dtype(BF16) == torch.float32
    assert wide_dtype(torch.float64) == torch.float64


class _Stack(nn.Module):
    """Mixers behind each other, which take down the dtypes that they compute with."""

    def __init__(self, layers):
        super().__init__()
        self.layers, self.met = layers, {}
        for number, layer in enumerate(layers):
            layer.register_forward_hook(partial(self._take_down, f"layers.{number}."))

    def _take_down(self, prefix, layer, inputs, output):
        self.met.update({prefix + name: p.dtype for name, p in layer.named_parameters()})

    def forward(self, x_TH):
        for layer in self.layers:
            x_TH = x_TH + layer(x_TH)
        return x_TH
