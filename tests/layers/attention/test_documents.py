"""Causal attention equals the dense formula, and packed documents equal documents alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.testing import assert_close

from megablocks_core.layers.attention.documents import document_positions
from tests.layers.attention.requests import causal_attention

F64 = torch.float64


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_rows_equal_the_dense_formula(num_kv_heads):
    q, k, v = _qkv(rows=2, tokens=7, num_kv_heads=num_kv_heads)
    q_ref, k_ref, v_ref = (x.detach().requires_grad_() for x in (q, k, v))
    y, y_ref = causal_attention(q, k, v), _dense(q_ref, k_ref, v_ref)
    y.square().sum().backward()
    y_ref.square().sum().backward()
    assert_close([y, q.grad, k.grad, v.grad], [y_ref, q_ref.grad, k_ref.grad, v_ref.grad])


@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=5), tail=st.integers(0, 3))
def test_documents_equal_the_documents_one_by_one(lengths, tail):
    tokens = sum(lengths) + tail
    q, k, v = _qkv(rows=1, tokens=max(tokens, 1), num_kv_heads=2)
    cu_seqlens = _sums(lengths)
    y = causal_attention(q, k, v, cu_seqlens=cu_seqlens)
    y.square().sum().backward()

    alone = [x.detach().requires_grad_() for x in (q, k, v)]
    expected = torch.zeros_like(y)
    for start, stop in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False):
        if start < stop:
            expected[:, start:stop] = causal_attention(*(x[:, start:stop] for x in alone))
    assert_close(y, expected)
    (expected.square().sum() + 0 * sum(x.sum() for x in alone)).backward()
    assert_close([x.grad for x in (q, k, v)], [x.grad for x in alone])


def test_f_100_pads_between_documents_neither_attend_nor_are_attended():
    q, k, v = _qkv(rows=1, tokens=8, num_kv_heads=4)
    with torch.no_grad():
        for x in (q, k, v):
            x[:, [3, 6, 7]] = float("nan")
    cu_seqlens, places = torch.tensor([0, 3, 5]), torch.tensor([0, 4, 8])
    y = causal_attention(q, k, v, cu_seqlens=cu_seqlens, cu_seqlens_padded=places)
    for start, stop in ((0, 3), (4, 6)):
        assert_close(y[:, start:stop], causal_attention(*(x[:, start:stop] for x in (q, k, v))))
    assert torch.equal(y[:, [3, 6, 7]], torch.zeros(1, 3, 4, 8, dtype=F64))
    for gradient in torch.autograd.grad(y.sum(), (q, k, v)):
        assert gradient.isfinite().all()
        assert not gradient[:, [3, 6, 7]].any()
    assert document_positions(8, cu_seqlens, places).tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_positions_start_again_with_every_document():
    assert document_positions(7, torch.tensor([0, 3, 3, 5])).tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert document_positions(2, torch.tensor([0, 2])).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        ({"cu_seqlens": [0, 9]}, "must end within"),
        ({"cu_seqlens": [1, 3]}, "start at 0"),
        ({"cu_seqlens": [0, 4, 2]}, "must not fall"),
        ({"cu_seqlens": [0, 4], "cu_seqlens_padded": [0, 3]}, "fit their places"),
        ({"cu_seqlens": [0, 4], "cu_seqlens_padded": [0, 4, 8]}, "must pair"),
        ({"cu_seqlens_padded": [0, 4]}, "must come with cu_seqlens"),
    ],
)
def test_bad_boundaries_raise(boundaries, message):
    tensors = {name: torch.tensor(value) for name, value in boundaries.items()}
    with pytest.raises(ValueError, match=message):
        causal_attention(*_qkv(rows=1, tokens=8, num_kv_heads=4), **tensors)


def test_documents_of_several_rows_raise():
    with pytest.raises(ValueError, match="one row"):
        causal_attention(*_qkv(rows=2, tokens=4, num_kv_heads=4), cu_seqlens=torch.tensor([0, 4]))


def test_packings_compile_once_and_change_nothing():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_loss, fullgraph=True, backend=counter)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, 9, (2 + seed % 7,), generator=generator).tolist()
        results = []
        for function in (compiled, _loss):
            q, k, v = _qkv(rows=1, tokens=sum(lengths) + 1, num_kv_heads=2)
            loss = function(q, k, v, _sums(lengths))
            loss.backward()
            results.append([loss, q.grad, k.grad, v.grad])
        assert_close(*results)
    assert counter.frame_count <= 3


@pytest.mark.parametrize("boundaries", [None, torch.tensor([0, 5, 16])])
def test_saves_inputs_result_and_one_float_a_head(boundaries):
    q, k, v = _qkv(rows=1, tokens=16, num_kv_heads=2)
    saved = {}

    def note(x):
        saved[x.data_ptr()] = x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        causal_attention(q, k, v, cu_seqlens=boundaries)
    assert sum(saved.values()) == 2 * q.numel() + 2 * k.numel() + 16 * 4


def _loss(q, k, v, cu_seqlens):
    return causal_attention(q.sin(), k, v, cu_seqlens=cu_seqlens).square().sum()


def _sums(lengths):
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()


def _qkv(*, rows, tokens, num_kv_heads):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(rows, tokens, heads, 8, generator=generator, dtype=F64).requires_grad_()
        for heads in (4, num_kv_heads, num_kv_heads)
    ]


def _dense(q, k, v):
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("btnd,bsnd->bnts", q, k) / q.shape[-1] ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.einsum("bnts,bsnd->btnd", scores.masked_fill(later, -torch.inf).softmax(-1), v)
