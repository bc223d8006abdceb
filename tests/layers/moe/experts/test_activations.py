"""Each activation's gradient in closed form is that of autograd."""

import pytest
import torch
from torch.testing import assert_close

from megablocks_core.layers.moe.experts.activations import ACTIVATIONS


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_are_those_of_autograd(name):
    activation = ACTIVATIONS[name]
    gate, up = (4 * torch.randn(50, 6, dtype=torch.float64) for _ in range(2))
    inputs = [gate, up] if activation.gated else [up]
    for tensor in inputs:
        tensor.requires_grad_()
    hidden = activation.forward(gate if activation.gated else None, up)
    dh = torch.randn_like(hidden)
    expected = torch.autograd.grad(hidden, inputs, dh)
    found = activation.backward(dh, gate.detach() if activation.gated else None, up.detach())
    assert (found[0] is None) == (not activation.gated)
    assert_close([each for each in found if each is not None], list(expected))


def test_gpt_oss_clamps_gate_from_above_and_up_from_both_sides():
    activation = ACTIVATIONS["clamped_swiglu"]
    gate, up = torch.tensor([9.0, -9.0, 1.0]), torch.tensor([9.0, -9.0, 0.5])
    by_hand = [
        8 * 7 * torch.tensor(1.702 * 7).sigmoid(),
        -6 * -9 * torch.tensor(1.702 * -9).sigmoid(),
        1.5 * torch.tensor(1.702).sigmoid(),
    ]
    assert_close(activation.forward(gate, up), torch.stack(by_hand))
    dgate, dup = activation.backward(torch.ones(3), gate, up)
    assert dgate is not None and dgate[0] == 0 and dgate[1] != 0
    assert dup[:2].tolist() == [0, 0] and dup[2] != 0


def test_relu2_is_squared():
    x = torch.tensor([-2.0, 3.0])
    assert ACTIVATIONS["relu2"].forward(None, x).tolist() == [0, 9]
