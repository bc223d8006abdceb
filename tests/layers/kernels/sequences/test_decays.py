"""Decays of chunks are exponentials of sums inside documents; their gradients are torch's."""

import torch
from torch.testing import assert_close

from megablocks_core.layers.kernels.sequences.decays import (
    Terms,
    crossing_of,
    decays_of,
    gradients_of_decays,
)


def test_decays_of_documents_that_end_inside_chunks():
    dt, A = torch.rand(1, 5, 1), torch.tensor([-0.5])
    log = (dt * A)[0, :, 0].double()
    decays = decays_of(dt, A, torch.tensor([0, 0, 1, 1, 1]), 3)
    enter, leave = decays.enter[0, 0], decays.leave[0, 0]
    assert_close(
        enter[0],
        torch.stack([log[:1].sum(), log[:2].sum(), -log.new_tensor(torch.inf)]).exp().float(),
    )
    assert_close(enter[1, :2], torch.stack([log[3], log[3:].sum()]).exp().float())
    assert leave[0].tolist() == [0, 0, 1] and decays.passing.flatten()[0] == 0
    assert_close(decays.passing.flatten()[1], log[3:].sum().exp().float())
    assert decays.dt[0, 0, 1].tolist() == [*dt[0, 3:, 0].tolist(), 0]


def test_sums_hold_more_than_float32():
    dt, A = torch.full((1, 64, 1), 1.0), torch.tensor([-60.1])
    decays = decays_of(dt, A, None, 64)
    sums = decays.high.double() + decays.low.double()
    right = A.double() * torch.arange(1, 65)
    assert_close(sums.flatten(), right, rtol=0, atol=1e-9)
    assert not torch.allclose(decays.high.double().flatten(), right, rtol=0, atol=1e-9)


def test_gradients_go_through_sums_of_chunks():
    dt = torch.rand(2, 5, 3, dtype=torch.float64, requires_grad=True)
    A = torch.rand(3, dtype=torch.float64, requires_grad=True)
    padded = torch.nn.functional.pad(dt.transpose(1, 2), (0, 1)).unflatten(2, (2, 3))
    sums = (padded * A[:, None, None]).cumsum(-1)
    crossing, read, left = (torch.randn_like(sums) for _ in range(3))
    terms = Terms(crossing, read, left, torch.randn_like(sums[..., 0]))
    last = sums[..., -1:]
    log = padded * A[:, None, None]
    through = (
        (crossing * log).sum()
        + (read * sums).sum()
        + (left * (last - sums)).sum()
        + (terms.passed * last[..., 0]).sum()
    )
    right = torch.autograd.grad(through, (dt, A))
    found = gradients_of_decays(terms, padded.detach(), A.detach(), 5)
    assert_close(list(found), list(right))


def test_pairs_of_tiles_cross_what_lies_between():
    matrix = torch.randn(2, 9, 9, dtype=torch.float64).tril(-1)
    right = torch.stack([matrix[:, k:, :k].sum((1, 2)) for k in range(9)], 1)
    tiles = matrix.unflatten(2, (3, 3)).unflatten(1, (3, 3)).transpose(2, 3)
    rows, columns = tiles.sum(-1), tiles.sum(-2)
    for one in range(3):
        own = tiles[:, one, one]
        rows[:, one, one] = torch.stack([own[:, k:, :k].sum((1, 2)) for k in range(3)], 1)
        columns[:, one, one:] = torch.nan
        rows[:, one, one + 1 :] = torch.nan
    assert_close(crossing_of(rows, columns), right)
