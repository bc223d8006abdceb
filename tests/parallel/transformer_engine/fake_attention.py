"""``DotProductAttention`` of ``transformer_engine.pytorch`` in plain torch, as ``fake`` says."""

# ruff: noqa: PLR0913 (the published arguments)

import torch
from torch import nn

from megablocks_core.layers.attention.backends import naive
from megablocks_core.layers.attention.spec import AttentionSpec


def documents(q, k, v, places, lengths, longest, spec):
    """The twin over documents of one row, without what kernels do not write."""
    assert places.dtype == torch.int32 and type(longest) is int
    inside = torch.zeros(len(q), dtype=torch.bool)
    pieces = []
    q, k, v = (_Unwritten.apply(x, inside) for x in (q, k, v))
    for start, length in zip(places.tolist(), lengths.tolist(), strict=False):
        own = slice(start, start + min(length, longest))
        inside[own] = True
        pieces.append(naive.attend(q[None, own], k[None, own], v[None, own], spec)[0])
    written = torch.cat(pieces)
    y = torch.full((len(q), *written.shape[1:]), torch.nan, dtype=q.dtype)
    return y.index_put((inside.nonzero()[:, 0],), written)


class _Unwritten(torch.autograd.Function):
    """Gradients of tokens of no document are not written."""

    @staticmethod
    def forward(ctx, x, inside):
        ctx.inside = inside
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
        return dy.masked_fill(~ctx.inside.view(-1, 1, 1), torch.nan), None


class DotProductAttention(nn.Module):
    """Attention; computed by the twin of ``layers.attention``.

    Heads of a result are joined. What kernels leave unwritten between documents is not a number.
    """

    def __init__(
        self,
        num_attention_heads,
        kv_channels,
        num_gqa_groups=None,
        attention_dropout=0.0,
        qkv_format="sbhd",
        attn_mask_type="causal",
        window_size=None,
        bottom_right_diagonal=None,
        softcap=0.0,
        sequence_parallel=False,
        tp_size=1,
        get_rng_state_tracker=None,
        tp_group=None,
        layer_number=None,
        attention_type="self",
        cp_group=None,
        cp_global_ranks=None,
        cp_stream=None,
        cp_comm_type="p2p",
        softmax_scale=None,
        softmax_type="vanilla",
        return_max_logit=False,
        name=None,
    ):
        super().__init__()
        assert (attention_dropout, sequence_parallel, tp_size, tp_group) == (0.0, False, 1, None)
        assert softmax_type in ("vanilla", "learnable")
        assert cp_group is None and attention_type == "self"
        self.heads, self.kv_heads = num_attention_heads, num_gqa_groups or num_attention_heads
        self.widths = (kv_channels,) * 2 if isinstance(kv_channels, int) else tuple(kv_channels)
        self.scale, self.softcap = softmax_scale, softcap
        self.qkv_format, self.mask, self.window = qkv_format, attn_mask_type, window_size
        self.softmax_offset = None
        if softmax_type == "learnable":
            self.softmax_offset = nn.Parameter(torch.zeros(num_attention_heads))

    def forward(
        self,
        query_layer=None,
        key_layer=None,
        value_layer=None,
        attention_mask=None,
        qkv_format=None,
        cu_seqlens_q=None,
        cu_seqlens_kv=None,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
        max_seqlen_q=None,
        max_seqlen_kv=None,
        attn_mask_type=None,
        window_size=None,
        bottom_right_diagonal=None,
        softcap=None,
        checkpoint_core_attention=False,
        core_attention_bias_type="no_bias",
        core_attention_bias=None,
        alibi_slopes=None,
        fast_zero_fill=True,
        inference_params=None,
        pad_between_seqs=None,
        fp8_output=False,
        bf16_backward=False,
        num_splits=1,
        score_mod=None,
        score_mod_bprop=None,
        score_mod_tensors=None,
        score_mod_bprop_tensors=None,
        qkv_layer=None,
        kv_layer=None,
        qkv_interleave_dim=-3,
        thd_attention_policies=None,
        thd_attention_policy_dispatch="auto",
    ):
        unused = (attention_mask, core_attention_bias, alibi_slopes, inference_params, score_mod)
        assert unused == (None,) * 5 and qkv_layer is None and kv_layer is None
        q, k, v = query_layer, key_layer, value_layer
        assert (q.shape[-2], k.shape[-2]) == (self.heads, self.kv_heads)
        assert (q.shape[-1], v.shape[-1]) == self.widths
        mask = self.mask if attn_mask_type is None else attn_mask_type
        window = self.window if window_size is None else window_size
        left, right = (None if size < 0 else size for size in window or (-1, -1))
        spec = AttentionSpec(
            mask="causal" if "causal" in mask else "full",
            window=(left, None if "causal" in mask else right),
            soft_cap=(self.softcap if softcap is None else softcap) or None,
            scale=self.scale,
            sinks=self.softmax_offset,
        )
        kind = self.qkv_format if qkv_format is None else qkv_format
        if kind == "bshd":
            assert mask in ("no_mask", "causal", "causal_bottom_right")
            # Its other causal mask has its corner at the first key.
            assert mask != "causal" or q.shape[1] == k.shape[1]
            return naive.attend(q, k, v, spec).flatten(-2)
        assert kind == "thd" and mask in ("padding", "padding_causal")
        bounds = (cu_seqlens_q, cu_seqlens_q_padded)
        for own, other in zip(bounds, (cu_seqlens_kv, cu_seqlens_kv_padded), strict=True):
            assert torch.equal(own, other) and own.dtype == torch.int32
        assert type(max_seqlen_q) is int and max_seqlen_q == max_seqlen_kv
        assert pad_between_seqs is not None, "left out, it is found by a read on the host"
        places = bounds[1] if pad_between_seqs else bounds[0]
        return documents(q, k, v, places, cu_seqlens_q.diff(), max_seqlen_q, spec).flatten(-2)
