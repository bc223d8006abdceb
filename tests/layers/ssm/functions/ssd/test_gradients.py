"""Gradients that all tokens share are added up in float64."""

import torch
from torch.testing import assert_close

from megablocks_core.layers.ssm import ssd_chunk_scan
from megablocks_core.layers.ssm.functions.ssd.chunks import Inputs
from megablocks_core.layers.ssm.functions.ssd.gradients import Gradients, Totals


def test_totals_are_rounded_once():
    x = torch.zeros(1, 4, 2, 3)
    A, D = torch.zeros(2), torch.zeros(2, 3)
    totals = Totals(Inputs(x, x[..., 0], A, x, x, D, None, None))
    assert totals.D is not None
    for each in (1.0, 2.0**-30, -1.0):
        totals.A += each
        totals.D += each
    gradients = Gradients(*(torch.empty(0) for _ in range(8)))
    gradients = gradients._replace(A=torch.empty(2), D=torch.empty(2, 3))
    totals.write(gradients)
    assert (gradients.A == 2.0**-30).all() and (gradients.D == 2.0**-30).all()


def test_the_gradient_of_d_over_many_tokens_keeps_its_digits():
    length = 1 << 16
    x, ones = torch.full((1, length, 1, 1), 0.1), torch.ones(1, length, 1, 1)
    D = torch.ones(1, requires_grad=True)
    y, _ = ssd_chunk_scan(x, ones[..., 0], -torch.ones(1), ones, ones, D=D)
    (grad,) = torch.autograd.grad(y.sum(), D)
    assert_close(grad, torch.tensor([0.1 * length]), rtol=1e-6, atol=0)
