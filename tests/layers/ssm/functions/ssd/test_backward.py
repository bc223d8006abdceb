"""Backward gives the gradients of the recurrence, whatever is done at a time."""

import pytest
import torch
from torch.testing import assert_close

from megablocks_core.layers.ssm import ssd_chunk_scan
from megablocks_core.layers.ssm.functions.ssd import plan
from tests.layers.ssm.functions.ssd.cases import draw, recurrence, run, sums_of


@pytest.mark.parametrize("numbers", [1, 200, 400, 1_000, 3_000, 10_000])
@pytest.mark.parametrize("lengths", [None, [9, 0, 33, 20]], ids=str)
def test_any_plan_gives_the_gradients_of_the_recurrence(monkeypatch, lengths, numbers):
    monkeypatch.setattr(plan, "_ON_CPU", numbers)
    rows, count, sums = (3, 3, None) if lengths is None else (1, 4, sums_of(lengths))
    leaves = draw(rows, 70, 6, 2, skip=2, states=count)

    def scan(*tensors, **options):
        return ssd_chunk_scan(*tensors, chunk_size=4, **options)

    right = recurrence(leaves, cu_seqlens=sums)
    for ours, theirs in zip(run(scan, leaves, cu_seqlens=sums), right, strict=True):
        assert_close(ours, theirs, rtol=0, atol=1e-9)


def test_gradients_have_the_dtypes_of_what_they_are_gradients_of():
    leaves = [leaf.detach() for leaf in draw(1, 20, 4, 2, skip=1)[:6]]
    kinds = [torch.bfloat16, torch.float32, torch.float32] + [torch.bfloat16] * 2 + [torch.float32]
    leaves = [x.to(kind).requires_grad_() for x, kind in zip(leaves, kinds, strict=True)]
    y, _ = ssd_chunk_scan(*leaves[:5], D=leaves[5], chunk_size=8)
    grads = torch.autograd.grad(y.float().sum(), leaves)
    assert [grad.dtype for grad in grads] == kinds
