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
        ({"window": 3}, "window=3 must be two numbers"),
        ({"window": (1.5, 0)}, r"window=\(1.5, 0\) must be two numbers"),
        ({"window": ("1", 0)}, "must be two numbers"),
        ({"soft_cap": "1"}, "soft_cap=1 must be above 0"),
        ({"soft_cap": True}, "soft_cap=True must be above 0"),
        ({"cu_seqlens": [0, 8]}, r"cu_seqlens=\[0, 8\] must be a tensor"),
        ({"cu_seqlens": torch.tensor([0.0, 8.0])}, "of torch.float32 must be whole numbers"),
        ({"cu_seqlens": torch.zeros(1, 2).int()}, r"cu_seqlens \[1, 2\] of"),
        ({"cu_seqlens": torch.zeros(0).int()}, r"cu_seqlens \[0\] of"),
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


def test_no_heads_no_features_and_dtypes_that_differ_raise():
    q, k, v = tensors()
    for wrong in ((q[:, :, :0], k, v), (q, k[:, :, :0], v[:, :, :0]), (q[..., :0], k[..., :0], v)):
        with pytest.raises(ValueError, match="must have a head and a feature at least"):
            attention(*wrong)
    for wrong in ((q, k.bfloat16(), v), (q.int(), k.int(), v.int())):
        for backend in ("naive", "sdpa", "flex"):
            with pytest.raises(ValueError, match=r"k of torch\..*must be of one floating dtype"):
                attention(*(x.detach() for x in wrong), backend=backend)
    with pytest.raises(ValueError, match="k=None"):
        attention(q, None, v)  # type: ignore[arg-type]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(q.float(), k.bfloat16(), v.float()).dtype == torch.bfloat16


@pytest.mark.parametrize("backend", ["naive", "sdpa", "flex"])
@pytest.mark.parametrize(("tokens", "keys"), [(0, 0), (0, 4), (3, 0)])
def test_no_tokens_are_no_error(backend, tokens, keys):
    q, k, v = torch.zeros(1, tokens, 4, 8), *(torch.ones(1, keys, 2, 8) for _ in range(2))
    for spec in (AttentionSpec(), AttentionSpec(window=(1, 0), sinks=torch.zeros(4))):
        y = attention(q, k, v, spec, backend=backend)
        assert torch.equal(y, torch.zeros(1, tokens, 4, 8))
