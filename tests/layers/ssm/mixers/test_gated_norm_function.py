"""The gated norm's own backward is right, block by block, and keeps its arguments alone."""

import pytest
import torch
from torch.nn.functional import silu
from torch.testing import assert_close

from megablocks_core.layers.ssm.mixers import gated_norm_function
from megablocks_core.layers.ssm.mixers.gated_norm_function import Form, gated_norm
from tests.layers.ssm.mixers.kinds import tokens

each_order = pytest.mark.parametrize("norm_before_gate", [False, True])


@each_order
@pytest.mark.parametrize("block", [12, 40, 1 << 17])
def test_gradients_are_those_of_differences(monkeypatch, norm_before_gate, block):
    monkeypatch.setattr(gated_norm_function, "_BLOCK", block)
    y, z = tokens(2, 5, 12).requires_grad_(), tokens(2, 5, 20).cos()[..., :12].requires_grad_()
    weight = torch.linspace(0.5, 2, 12, dtype=torch.float64, requires_grad=True)
    form = Form(4, 0.1, norm_before_gate)
    assert torch.autograd.gradcheck(lambda *args: gated_norm(*args, form), (y, z, weight))


@each_order
def test_blocks_and_16_bits_give_what_the_formula_gives(monkeypatch, norm_before_gate):
    monkeypatch.setattr(gated_norm_function, "_BLOCK", 24)
    y, z, dy = (tokens(7, 12, dtype=torch.bfloat16).roll(shift) for shift in range(3))
    weight = torch.linspace(0.5, 2, 12)
    found, expected = [], []
    for results, function in ((found, gated_norm), (expected, _formula)):
        leaves = [x.clone().requires_grad_() for x in (y, z, weight)]
        out = function(*leaves, Form(6, 0.1, norm_before_gate))
        results += [out, *torch.autograd.grad(out, leaves, dy)]
    assert [x.dtype for x in found] == [x.dtype for x in expected]
    assert_close(found, expected)


@each_order
def test_its_arguments_are_all_that_is_kept(norm_before_gate):
    kept = []
    y, z, weight = torch.randn(9, 6), torch.randn(9, 6), torch.ones(6, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        gated_norm(y, z, weight, Form(3, 1e-5, norm_before_gate))
    assert {x.data_ptr() for x in kept} == {x.data_ptr() for x in (y, z, weight)}


def test_no_rows_and_empty_gradients():
    leaves = [torch.empty(0, 6, requires_grad=True) for _ in range(2)]
    weight = torch.ones(6, requires_grad=True)
    gated_norm(*leaves, weight, Form(3, 1e-5, False)).sum().backward()
    assert torch.equal(weight.grad, torch.zeros(6)) and leaves[0].grad.shape == (0, 6)


def _formula(y, z, weight, form):
    gate, wide = silu(z.float()), y.float()
    x = wide if form.norm_before_gate else wide * gate
    groups = x.unflatten(-1, (-1, form.group_size))
    norm = (groups * (groups.square().mean(-1, keepdim=True) + form.eps).rsqrt()).flatten(-2)
    return (norm * weight * (gate if form.norm_before_gate else 1)).to(y.dtype)
