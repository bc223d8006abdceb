"""Requests to attention that say nothing sensible raise, and name what is wrong."""

import pytest
import torch

from megablocks_core.layers.attention import AttentionSpec, attention
from megablocks_core.layers.attention.dropping import Dropped
from tests.layers.attention.requests import sums, tensors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": "sliding"}, "mask='sliding' must be"),
        ({"window": (-1, None)}, r"window=\(-1, None\) must be two numbers"),
        ({"window": (1, 2, 3)}, "must be two numbers"),
        ({"window": (1, 2)}, "behind the place of a causal query"),
        ({"soft_cap": 0.0}, "soft_cap=0.0 must be above 0"),
        ({"scale": float("inf")}, "scale=inf must be above 0 and finite"),
        ({"max_seqlen": 3}, "max_seqlen must come with cu_seqlens"),
        ({"cu_seqlens_padded": sums([3])}, "cu_seqlens_padded must come with cu_seqlens"),
    ],
)
def test_values_out_of_their_range_raise(options, message):
    with pytest.raises(ValueError, match=message):
        AttentionSpec(**options)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ({"rows": 2}, {"cu_seqlens": sums([4])}, "one row of tokens, not 2"),
        ({"keys": 5}, {"cu_seqlens": sums([4])}, "a key for each query"),
        ({"kv_heads": 3}, {}, "3 key heads must divide 4 query heads"),
        ({}, {"sinks": torch.zeros(2)}, "one for each of 4 heads"),
        ({}, {"dropout": Dropped(0.1, "", torch.zeros(1, 8, 2))}, "one for each query"),
    ],
)
def test_shapes_that_do_not_fit_raise(shape, options, message):
    with pytest.raises(ValueError, match=message):
        attention(*tensors(**shape), AttentionSpec(**options))


def test_keys_of_other_widths_or_rows_raise():
    q, k, v = tensors()
    for wrong in ((q[0], k, v), (q, k[..., :4], v), (q, k[:, :3], v), (q[:0], k, v)):
        with pytest.raises(ValueError, match=r"q \[.*\], k \[.*\], v \[.*\]"):
            attention(*wrong)


def test_a_causal_mask_is_a_limit_of_sight():
    assert AttentionSpec().limits == (None, 0)
    assert AttentionSpec(mask="full").limits == (None, None)
    assert AttentionSpec(mask="full", window=(3, 1)).limits == (3, 1)
