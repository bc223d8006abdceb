"""Sums over sequences are those of each sequence alone."""

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
