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


def test_places_are_summed_from_the_first_to_the_last():
    rows = torch.tensor([[1e8], [1.0], [-1e8]])
    in_order = passes.sum_places(rows, torch.tensor([[0, 1, 2], [0, 2, 1], [-1, 1, -1]]))
    assert in_order.tolist() == [[0.0], [1.0], [1.0]]  # 1e8 + 1 is 1e8 in float32
    assert passes.sum_places(rows, torch.empty(2, 0, dtype=torch.int64)).tolist() == [[0], [0]]
