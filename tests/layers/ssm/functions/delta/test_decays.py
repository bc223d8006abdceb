"""Decays within chunks are products of the tokens' decays, and their gradients those of torch."""

import torch
from torch.testing import assert_close

from megablocks_core.layers.ssm.functions.delta.decays import decays_backward, decays_of


def test_decays_are_products():
    g = -torch.rand(2, 5).double()
    carried, between = decays_of(g)
    for row in range(2):
        for i in range(5):
            assert_close(carried[row, i], g[row, : i + 1].sum().exp())
            for j in range(5):
                right = g[row, j + 1 : i + 1].sum().exp() if j <= i else g.new_zeros(())
                assert_close(between[row, i, j], right)


def test_gradients_are_those_of_torch():
    g = -torch.rand(2, 5).double()
    g.requires_grad_()
    carried, between = decays_of(g)
    dcarried, dbetween = torch.randn_like(carried), torch.randn_like(between)
    (right,) = torch.autograd.grad((carried, between), g, (dcarried, dbetween))
    assert_close(decays_backward(carried, between, dcarried, dbetween), right)


def test_what_is_small_beside_a_long_sum_is_not_lost():
    """Two decays of 1e-4 behind one of 1e8, and a token that forgets all."""
    g = torch.tensor([-1e8, -1e-4, -1e-4, -torch.inf, -1e-4])
    _, between = decays_of(g)
    assert_close(between[2, 0], torch.tensor(-2e-4).exp(), rtol=1e-7, atol=0)
    assert between.isfinite().all() and between[3, 2] == between[4, 2] == 0
    assert_close(between[4, 3], torch.tensor(-1e-4).exp(), rtol=1e-7, atol=0)
