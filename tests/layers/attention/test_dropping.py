"""Attention that drops probabilities equals its formula, however heads and documents are cut."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.testing import assert_close

from megablocks_core.layers.attention.documents import document_positions
from megablocks_core.layers.attention.dropping import Dropped, index_of_heads
from megablocks_core.parallel import DropoutKey, dropout
from tests.layers.attention.requests import causal_attention

F64 = torch.float64


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_rows_equal_the_dense_formula_with_the_same_mask(num_kv_heads):
    q, k, v = _qkv(rows=2, tokens=7, num_kv_heads=num_kv_heads)
    twins = [x.detach().requires_grad_() for x in (q, k, v)]
    dropped = _dropped(torch.arange(2).unsqueeze(-1), torch.arange(7))
    y, expected = causal_attention(q, k, v, dropped=dropped), _dense(*twins, dropped)
    for result in (y, expected):
        result.square().sum().backward()
    assert_close([y, q.grad, k.grad, v.grad], [expected, *(x.grad for x in twins)])


def test_no_two_heads_drop_alike_and_the_rate_is_right():
    ones = torch.ones(1, 64, 4, 8)
    dropped = _dropped(torch.zeros(1, 1).long(), torch.arange(64))
    kept_NTT = _scale(dropped, 64)[0].ne(0).double()
    signs = (kept_NTT * 2 - 1).flatten(1)
    assert abs(kept_NTT.mean() - 0.7) < 4 * (0.21 / kept_NTT.numel()) ** 0.5
    agreement = (signs @ signs.T / 4096).fill_diagonal_(0)
    assert (agreement - 0.16 * (1 - torch.eye(4))).abs().max() < 4 / 64
    assert causal_attention(ones, ones, ones, dropped=dropped).std() > 0.01


@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=4), tail=st.integers(0, 2))
def test_documents_in_one_row_equal_the_documents_one_by_one(lengths, tail):
    cu_seqlens = F.pad(torch.tensor(lengths).cumsum(0), (1, 0))
    tokens = max(sum(lengths) + tail, 1)
    q, k, v = _qkv(rows=1, tokens=tokens, num_kv_heads=2)
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    samples = F.pad(numbers, (0, tokens - len(numbers)))
    together = causal_attention(
        q,
        k,
        v,
        cu_seqlens=cu_seqlens,
        dropped=_dropped(samples.unsqueeze(0), document_positions(tokens, cu_seqlens)),
    )
    together.square().sum().backward()

    alone = [x.detach().requires_grad_() for x in (q, k, v)]
    expected = torch.zeros_like(together)
    for number, (start, length) in enumerate(zip(cu_seqlens.tolist(), lengths, strict=False)):
        if length:
            expected[:, start : start + length] = causal_attention(
                *(x[:, start : start + length] for x in alone),
                dropped=_dropped(torch.tensor([[number]]), torch.arange(length)),
            )
    assert_close(together, expected)
    (expected.square().sum() + 0 * sum(x.sum() for x in alone)).backward()
    assert_close([x.grad for x in (q, k, v)], [x.grad for x in alone])


def test_heads_of_a_rank_drop_as_in_the_whole_layer():
    q, k, v = _qkv(rows=1, tokens=6, num_kv_heads=2)
    ids, positions = torch.tensor([[3]]), torch.arange(6)
    whole = causal_attention(q, k, v, dropped=_dropped(ids, positions))
    for rank in range(2):
        heads = slice(2 * rank, 2 * rank + 2)
        own_kv = (x[:, :, rank : rank + 1] for x in (k, v))
        own = causal_attention(
            q[:, :, heads], *own_kv, dropped=_dropped(ids, positions, heads=heads)
        )
        assert_close(own, whole[:, :, heads])


def test_sixteen_bits_are_close_to_the_exact_result():
    q, k, v = (x.detach().bfloat16() for x in _qkv(rows=1, tokens=32, num_kv_heads=2))
    dropped = _dropped(torch.tensor([[3]]), torch.arange(32))
    y = causal_attention(q, k, v, dropped=dropped)
    exact = causal_attention(q.double(), k.double(), v.double(), dropped=dropped)
    assert y.dtype == torch.bfloat16
    assert (y - exact).norm() < 0.01 * exact.norm()


def test_saves_inputs_words_and_two_numbers_a_probability():
    q, k, v = _qkv(rows=1, tokens=16, num_kv_heads=2)
    dropped = _dropped(torch.tensor([[3]]), torch.arange(16))
    saved = {}

    def note(x):
        saved[x.data_ptr()] = x.nbytes
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        causal_attention(q, k, v, dropped=dropped)
    sizes = [q.numel(), k.numel(), v.numel(), dropped.index_BTN.numel(), 2 * 4 * 16 * 16]
    assert sum(saved.values()) == 8 * sum(sizes) + 16 * 16  # And one mask of what is later.


def test_steps_and_packings_compile_once_and_change_nothing():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_loss, fullgraph=True, backend=counter)
    for step in range(20):
        generator = torch.Generator().manual_seed(step)
        lengths = torch.randint(1, 9, (2 + step % 7,), generator=generator)
        cu_seqlens = F.pad(lengths.cumsum(0), (1, 0))
        results = []
        for function in (compiled, _loss):
            q, k, v = _qkv(rows=1, tokens=int(lengths.sum()) + 1, num_kv_heads=2)
            loss = function(q, k, v, cu_seqlens, DropoutKey(1, step))
            loss.backward()
            results.append([loss, q.grad, k.grad, v.grad])
        assert_close(*results)
    assert counter.frame_count <= 3


def _loss(q, k, v, cu_seqlens, key):
    index = key.index(torch.tensor([[5]]), torch.arange(q.shape[1]))
    dropped = Dropped(0.3, "layer", index_of_heads(index, slice(0, 4)))
    rows = causal_attention(q.sin(), k, v, dropped=dropped)
    packed = causal_attention(q.sin(), k, v, cu_seqlens=cu_seqlens, dropped=dropped)
    return (rows * packed.cos()).sum()


def _dropped(sample_ids, positions, *, heads=slice(0, 4), p=0.3):
    index = DropoutKey(seed=1, step=2).index(sample_ids, positions)
    return Dropped(p, "layers.0.self_attn", index_of_heads(index, heads))


def _scale(dropped, tokens):
    """What each probability is multiplied by [B N T T]."""
    index = dropped.index_BTN.transpose(1, 2)
    ones = torch.ones(*index.shape, tokens, dtype=F64)
    return dropout(ones, dropped.p, stream=dropped.stream, index=index)


def _qkv(*, rows, tokens, num_kv_heads):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(rows, tokens, heads, 8, generator=generator, dtype=F64).requires_grad_()
        for heads in (4, num_kv_heads, num_kv_heads)
    ]


def _dense(q, k, v, dropped):
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("btnd,bsnd->bnts", q, k) / q.shape[-1] ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    probabilities = scores.masked_fill(later, -torch.inf).softmax(-1)
    return torch.einsum("bnts,bsnd->btnd", probabilities * _scale(dropped, q.shape[1]), v)
