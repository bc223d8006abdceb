"""Decays are exponentials of sums: exact, never denormal, and none across documents."""

import pytest
import torch
from torch.testing import assert_close

from megablocks_core.layers.ssm.functions.ssd.decays import (
    between,
    causal,
    decay_of,
    decays_of,
    parted,
    vanishing,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_decay_is_its_exponential_or_nothing(dtype):
    floor = vanishing(dtype)
    logs = torch.tensor([0.0, -1.0, floor + 1, floor - 1, -1e30, -torch.inf], dtype=dtype)
    found = decay_of(logs)
    assert_close(found[:3], logs[:3].exp())
    assert not found[3:].any()
    assert found[found != 0].min() > torch.finfo(dtype).tiny


def test_differences_of_large_sums_keep_their_digits():
    torch.manual_seed(0)
    dt = torch.where(torch.rand(1, 1, 2, 64) < 0.5, 50.0, 1e-3)
    A = torch.tensor([-1.0, -0.5])
    found = decays_of(dt, A, causal(64, dt.device))
    matrix = torch.empty(1, 1, 2, 64, 64)
    between(found.sums, matrix)
    matrix = matrix * found.low[..., :, None] * found.unlow[..., None, :]
    logs = (dt.double() * A[:, None]).cumsum(-1)
    right = (logs[..., :, None] - logs[..., None, :]).exp()
    earlier = torch.ones(64, 64, dtype=torch.bool).tril()
    near = earlier & (right > 1e-20)
    assert_close(matrix[near].double(), right[near], rtol=5e-6, atol=0)
    assert ((matrix >= 0) & (matrix <= 1.001)).all()
    assert_close(found.enter.double(), logs.exp(), rtol=1e-5, atol=1e-25)
    left = (logs[..., -1:] - logs).exp()
    assert_close(found.leave.double(), left, rtol=1e-5, atol=1e-25)
    assert torch.equal(found.passing, found.enter[..., -1])


def test_nothing_passes_from_one_document_to_another():
    document = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [2, 3, 3, 5]])
    parts = parted(document, torch.tensor([0, 1, 1]))
    assert parts.borders is not None
    enters, leaves, passes = parts.borders
    assert enters[:, 0, 0].tolist() == [[True, True, False, False], [True] * 4, [False] * 4]
    assert leaves[:, 0, 0].tolist() == [[False] * 2 + [True] * 2, [True] * 4, [False] * 3 + [True]]
    assert passes.flatten().tolist() == [False, True, False]
    meets = ~parts.apart[:, 0, 0]
    pairs = [tuple(pair) for pair in meets.nonzero().tolist()]
    whole = [(1, i, j) for i in range(4) for j in range(i)]
    assert sorted(pairs) == sorted([(0, 1, 0), (0, 3, 2), *whole, (2, 2, 1)])
    found = decays_of(torch.ones(3, 1, 1, 4), -torch.ones(1), parts)
    assert found.enter[0, 0, 0, 2:].eq(0).all() and found.leave[2, 0, 0, :3].eq(0).all()
    assert found.passing.flatten().gt(0).tolist() == [False, True, False]
