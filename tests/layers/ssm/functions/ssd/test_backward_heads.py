"""States that forward gives have gradients too."""

import torch
from torch.testing import assert_close

from megablocks_core.layers.ssm.functions.recurrences import ssd_recurrence
from megablocks_core.layers.ssm.functions.ssd.chunks import Inputs
from megablocks_core.layers.ssm.functions.ssd.operation import chunked_scan
from tests.layers.ssm.functions.ssd.cases import draw


def test_a_loss_of_the_states_before_chunks_reaches_every_input():
    x, dt, A, B, C, _, carry = leaves = draw(2, 22, 4, 2, states=2)
    inputs = Inputs(x, dt, A, B, C, None, None, None)
    found = chunked_scan(inputs, carry, chunk_size=4, every_chunk=True)
    weights = torch.randn_like(found.states)
    loss = (found.states * weights).sum() + found.y.sum()
    right = ssd_recurrence(x, dt, A, B, C, initial_state=carry)[0].sum()
    for index, weight in enumerate(weights):
        part = [each[:, : 4 * index] for each in (x, dt, B, C)]
        _, state = ssd_recurrence(*part[:2], A, *part[2:], initial_state=carry)
        right = right + (state * weight).sum()
    given = [leaf for leaf in leaves if leaf is not None]
    pairs = zip(torch.autograd.grad(loss, given), torch.autograd.grad(right, given), strict=True)
    for ours, theirs in pairs:
        assert_close(ours, theirs, rtol=0, atol=1e-9)


def test_what_is_added_to_states_has_its_gradient():
    x, dt, A, B, C, *_ = draw(1, 12, 2, 1)
    entries = torch.randn(3, 1, 2, 3, 4, dtype=torch.float64, requires_grad=True)

    def scan(entries, dt):
        y, final, _ = chunked_scan(Inputs(x, dt, A, B, C, None, entries, None), None, chunk_size=4)
        return y, final

    assert torch.autograd.gradcheck(scan, (entries, dt))
