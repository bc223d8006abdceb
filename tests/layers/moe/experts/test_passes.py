"""Passes over rows, and their gradients."""

import pytest
import torch
from torch.testing import assert_close

from megablocks_core.layers.moe.experts import passes
from megablocks_core.layers.moe.experts.activations import ACTIVATIONS


@pytest.mark.parametrize("weighted", [True, False])
def test_gradients_of_a_weighted_hidden_activation(weighted):
    activation = ACTIVATIONS["swiglu"]
    gate, up = (torch.randn(7, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weights = torch.rand(7, dtype=torch.float64, requires_grad=True)
    used = weights if weighted else None
    hidden = passes.hidden(activation, gate, up, used)
    dh = torch.randn_like(hidden)
    wanted = [gate, up, *([weights] if weighted else [])]
    expected = torch.autograd.grad(hidden, wanted, dh)
    with torch.no_grad():
        found = passes.hidden_backward(activation, dh, gate, up, used)
    assert_close(found.hidden, hidden.detach())
    assert_close([found.gate, found.up], list(expected[:2]))
    if weighted:
        assert_close(found.weights, expected[2])
    else:
        assert found.weights is None
