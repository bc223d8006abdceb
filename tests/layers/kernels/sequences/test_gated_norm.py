"""The gated RMS norm in Triton is the plain one, as the mixers' norm uses it."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megablocks_core.layers.kernels.sequences import gated_norm as launches
from megablocks_core.layers.ssm.mixers.gated_norm import GatedRMSNorm
from tests.layers.kernels.interpreter import interpreted
from tests.layers.kernels.sequences.serving import (
    LIMITS,
    assert_near,
    in_triton,
    narrowed,
    widened,
)


def plain(y, z, weight, *, groups, first):
    """The norm, written out."""
    gate = z * torch.sigmoid(z)
    x = (y if first else y * gate).unflatten(-1, (groups, -1))
    normed = (x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt()).flatten(-2) * weight
    return normed * gate if first else normed


def ours(y, z, weight, *, groups, first):
    norm = GatedRMSNorm(weight.numel(), groups=groups, eps=1e-3, norm_before_gate=first)
    return norm.with_weight(y, z, weight)


def run(function, leaves, **options):
    out = function(*leaves, **options)
    return [out, *torch.autograd.grad((out * (out.detach() + 1)).sum(), leaves)]


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, *(pytest.param(each, marks=pytest.mark.slow) for each in list(LIMITS)[1:])],
)
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(("groups", "shape"), [(3, (2, 5, 39)), (1, (70, 700))])
@interpreted
def test_outputs_and_gradients(groups, shape, first, dtype):
    drawn = [torch.randn(shape), torch.randn(shape), torch.randn(shape[-1])]
    leaves = narrowed(drawn, dtype)
    with in_triton() as taken:
        results = run(ours, leaves, groups=groups, first=first)
    assert len(taken) == 1
    right = run(plain, widened(leaves), groups=groups, first=first)
    assert_near(results, right, LIMITS[dtype])


@pytest.mark.slow
@interpreted
def test_more_tokens_than_a_program_takes_in_backward():
    drawn = [torch.randn(600, 1000), torch.randn(600, 1000), torch.randn(1000)]
    leaves = narrowed(drawn, torch.float32)
    with in_triton():
        results = run(ours, leaves, groups=2, first=False)
    assert_near(results, run(plain, widened(leaves), groups=2, first=False), LIMITS[torch.float32])


def test_nothing_is_read_on_the_host(monkeypatch):
    seen = []
    monkeypatch.setattr(launches, "launch", lambda kernel, *rest, **named: seen.append(kernel))
    with FakeTensorMode():
        y = torch.zeros(3, 8, requires_grad=True)
        given = {"group_size": 4, "eps": 1e-5, "norm_before_gate": False}
        launches.gated_rms_norm(y, y.detach(), torch.zeros(8), **given).sum().backward()
    assert len(seen) == 2
