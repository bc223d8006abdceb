"""The published functions of flash-attention, which compute with the twin on any device and dtype.

Version 2 as flash-attn 2.8.3.post2 has it. Version 3 as ``hopper/flash_attn_interface.py`` of
Dao-AILab/flash-attention at commit 01afd16d248c4c7d0f9aed1914084f16c490eaed, which no package
index has; flash-attn 2.8.3.post2 brings an earlier state of that file, without the last argument.
What kernels leave unwritten is not a number here, in results and gradients.
"""

# ruff: noqa: PLR0913 (the published arguments)

import sys
from types import ModuleType

import torch

from megablocks_core.layers.attention.backends import naive
from megablocks_core.layers.attention.spec import AttentionSpec
from tests.parallel.transformer_engine.fake_attention import documents


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """Version 2, whole rows."""
    assert dropout_p == 0 and alibi_slopes is None and not return_attn_probs
    return naive.attend(q, k, v, _spec(softmax_scale, causal, window_size, softcap))


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """Version 2, documents without pads between them."""
    assert dropout_p == 0 and alibi_slopes is None and not return_attn_probs
    assert block_table is None
    spec = _spec(softmax_scale, causal, window_size, softcap)
    assert torch.equal(cu_seqlens_q, cu_seqlens_k) and max_seqlen_q == max_seqlen_k
    return documents(q, k, v, cu_seqlens_q, cu_seqlens_q.diff(), max_seqlen_q, spec)


def flash_attn_3_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    """Version 3, whole rows."""
    assert (qv, q_descale, k_descale, v_descale, attention_chunk) == (None, None, None, None, 0)
    return naive.attend(q, k, v, _spec(softmax_scale, causal, window_size, softcap))


def flash_attn_3_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    """Version 3, documents of which the first tokens at their places are used."""
    assert (qv, q_descale, k_descale, v_descale, attention_chunk) == (None, None, None, None, 0)
    assert torch.equal(cu_seqlens_q, cu_seqlens_k) and max_seqlen_q == max_seqlen_k
    lengths = cu_seqlens_q.diff()
    if seqused_q is not None:
        assert torch.equal(seqused_q, seqused_k) and seqused_q.dtype == torch.int32
        lengths = seqused_q
    spec = _spec(softmax_scale, causal, window_size, softcap)
    return documents(q, k, v, cu_seqlens_q, lengths, max_seqlen_q, spec)


def _spec(softmax_scale, causal, window_size, softcap):
    left, right = (None if size < 0 else size for size in window_size)
    return AttentionSpec(
        mask="causal" if causal else "full",
        window=(left, None if causal else right),
        soft_cap=softcap or None,
        scale=softmax_scale,
    )


def install(monkeypatch):
    """Puts both versions in place of what is installed."""
    two, three = ModuleType("flash_attn"), ModuleType("flash_attn_interface")
    two.__dict__.update(
        flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func
    )
    three.__dict__.update(
        flash_attn_func=flash_attn_3_func, flash_attn_varlen_func=flash_attn_3_varlen_func
    )
    monkeypatch.setitem(sys.modules, "flash_attn", two)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", three)
