"""Sums over sequences are those of each sequence alone."""

import pytest
import torch
from torch.testing import assert_close

from megablocks_core.layers.moe.losses.sequences import per_sequence
from megablocks_core.layers.moe.routers import route_top_k


def test_sums_are_those_of_each_sequence_even_of_an_empty_one():
    torch.manual_seed(0)
    logits, mask = torch.randn(9, 5).double(), torch.rand(9) > 0.3
    bounds = [0, 2, 2, 6, 9]
    routing = route_top_k(logits, top_k=2, mask=mask)
    scores, choices, tokens = per_sequence(
        routing, sequence_length=None, cu_seqlens=torch.tensor(bounds)
    )
    for row, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        alone = route_top_k(logits[start:end], top_k=2, mask=mask[start:end])
        assert_close(scores[row], alone.scores.sum(0))
        assert torch.equal(choices[row], alone.tokens_per_expert)
        assert tokens[row] == alone.num_tokens


@pytest.mark.parametrize("bounds", [[0, 4], [0, 4, 20], [-3, 9], [0, 7, 4, 9], [2, 9], [0]])
def test_bounds_that_leave_tokens_out_or_fall_are_refused(bounds):
    routing = route_top_k(torch.randn(9, 5), top_k=2)
    with pytest.raises(ValueError, match="must rise from 0 to the 9 tokens"):
        per_sequence(routing, sequence_length=None, cu_seqlens=torch.tensor(bounds))


def test_pads_may_lie_in_no_sequence():
    logits, mask = torch.randn(9, 5), torch.arange(9) < 6
    bounds = torch.tensor([0, 4, 6])
    padded, plain = (
        per_sequence(routing, sequence_length=None, cu_seqlens=bounds)
        for routing in (
            route_top_k(logits, top_k=2, mask=mask),
            route_top_k(logits[:6], top_k=2),
        )
    )
    assert_close(padded, plain)


@pytest.mark.parametrize("options", [{"sequence_length": 3.0}, {"cu_seqlens": [0, 9]}])
def test_other_kinds_of_lengths_are_refused(options):
    routing = route_top_k(torch.randn(9, 5), top_k=2)
    with pytest.raises(ValueError, match="must divide|must be a tensor"):
        per_sequence(routing, **{"sequence_length": None, "cu_seqlens": None, **options})
