"""Divergences add up over any parts of a vocabulary."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from megablocks_core.parallel.losses.divergence_criteria import TopKTeacher, WholeTeacher


def _logits(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 10, generator=generator, dtype=torch.float64) for _ in range(2)]


def _criterion(y_nV, stored, reverse):
    if stored:
        log_probs, indices = y_nV.log_softmax(-1).topk(3)
        return TopKTeacher(log_probs, indices, False, reverse, 1.0)
    return WholeTeacher(lambda first, width: y_nV[:, first : first + width], reverse, 1.0)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@given(cuts=st.lists(st.integers(0, 10), max_size=4), seed=st.integers(0, 2))
def test_parts_of_any_width_have_the_losses_and_gradients_of_the_whole(stored, reverse, cuts, seed):
    x_nV, y_nV = _logits(seed)
    criterion, scale_n = _criterion(y_nV, stored, reverse), torch.linspace(-1, 2, 4).double()
    edges = [0, *sorted(cuts), 10]
    results = []
    for bounds in ([0, 10], edges):
        blocks = [(a, x_nV[:, a:b].clone()) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
        parts = [criterion.partial_(x_nb, first) for first, x_nb in blocks]
        sums = criterion.merge(torch.stack(parts))
        for (first, x_nb), part in zip(blocks, parts, strict=True):
            criterion.differentiate_(x_nb, first, part, sums, scale_n)
        results.append((criterion.losses(sums), torch.cat([x_nb for _, x_nb in blocks], dim=-1)))
    for ours, whole in zip(*results, strict=True):
        assert_close(ours, whole, rtol=0, atol=1e-12)
    assert_close(results[0][1].sum(-1), torch.zeros(4).double(), rtol=0, atol=1e-12)
