"""Grouped-query attention (Ainslie et al., https://arxiv.org/abs/2305.13245), tensor-parallel.

Dimensions: T tokens, H hidden size, N query heads, K key and value heads, D features of a
head, E documents. A lowercase letter is this rank's share of the capital one: n = N / tp.size,
k = max(K / tp.size, 1).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from megablocks_core.groups import LOCAL, Group, Segment, ShardSpec, mark, split_evenly
from megablocks_core.layers.attention.choice import attention, check_backend
from megablocks_core.layers.attention.dropping import Dropped, index_of_heads
from megablocks_core.layers.attention.projection_norm import ProjectionNorm, normalise
from megablocks_core.layers.attention.spec import AttentionSpec
from megablocks_core.layers.linear import LinearFactory, apply_each, parallel_linear
from megablocks_core.layers.norm import on_part
from megablocks_core.layers.rotary import RotaryEmbedding, rotate
from megablocks_core.parallel import Dropout

Norms = Sequence[Callable[[Tensor], Tensor]]


class CachedHeads(nn.Module):
    """Gives back keys and values as a cache would hold them: a place for hooks."""

    def forward(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Both [... T k D], after norms and positions, unchanged."""
        return k, v


class Attention(nn.Module):
    """Causal self-attention whose heads are split over ``tp``.

    Maps ``x`` [... T H] to ``y`` [... T H]: ``o_proj(attention(q_proj(x), k_proj(x), v_proj(x)))``
    with queries and keys turned by their positions. Query, key and value share their
    messages: forward sends one all-reduce and backward one. Under sequence parallelism ``x``
    and ``y`` hold this rank's tokens; forward sends an all-gather and a reduce-scatter, and
    backward these two and the second gather of ``x``. Backward sends one small message more
    for the weights of query and key norms, and one for key and value heads that several
    ranks hold. Norms over whole projections send one small message more forward and backward.

    Args:
        hidden_size: H.
        num_heads: N.
        num_kv_heads: K, which divides N; default N. Fewer than the ranks is served:
            neighbours then hold the same head.
        head_dim: D; default H / N.
        bias: Biases of all four projections; "qkv" for those of the inputs alone.
        rotary: Position embedding; ``None`` for none.
        scale: Of the products of queries and keys; default 1 / sqrt(D).
        dropout: Of attention probabilities; with it they are computed in the open.
        sequence_parallel: The ranks hold equal slices of the tokens.
        linear: Builds the projections; default ``parallel_linear``, which see.
        norm: Builds the norms of query and key heads from ``head_dim``; ``None`` for none.
        projection_norm_eps: In place of ``norm``, RMS norms over the features of all query heads
            and all key heads, with this under the root.
        clip: Queries, keys and values are clamped to this size, after norms.
        gated: What a head has attended to is multiplied by the sigmoid of a gate; ``q_proj`` makes
            the features of a head's query, then those of its gate, head by head.
        window: How many keys before a token, and behind it 0 or ``None``, are seen beside its own;
            default all before.
        soft_cap: Of the products; see ``AttentionSpec``.
        sinks: Each query head has a logit in the denominator of its softmax, the parameter
            ``sinks`` [n], at first zero.
        backend: What computes the product; see ``attention``.
        tp: The tensor-parallel ranks.
        device: Of the parameters.
        dtype: Of the parameters.

    Raises:
        ValueError: Heads do not divide evenly over each other or over ``tp``, there are two
            kinds of norms, or there is no such window, cap or back end.
    """

    def __init__(  # noqa: PLR0913 (each is an option of its own)
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool | Literal["qkv"] = False,
        rotary: RotaryEmbedding | None = None,
        scale: float | None = None,
        dropout: Dropout | None = None,
        sequence_parallel: bool = False,
        linear: LinearFactory | None = None,
        norm: Callable[..., nn.Module] | None = None,
        projection_norm_eps: float | None = None,
        clip: float | None = None,
        gated: bool = False,
        window: tuple[int | None, int | None] | None = None,
        soft_cap: float | None = None,
        sinks: bool = False,
        backend: str = "auto",
        tp: Group = LOCAL,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = _head_dim(hidden_size, num_heads, head_dim)
        self.heads = split_evenly(num_heads, group=tp, name="num_heads")
        kv_segments = _kv_segments(num_heads, num_kv_heads, self.head_dim, tp)
        self.sequence_parallel, self.tp = sequence_parallel, tp
        build = partial(
            linear or parallel_linear,
            sequence_parallel=sequence_parallel,
            group=tp,
            device=device,
            dtype=dtype,
        )
        column = partial(build, parallel_mode="column", bias=bool(bias))
        q_size, kv_size = num_heads * self.head_dim, num_kv_heads * self.head_dim
        self.q_proj = column(hidden_size, 2 * q_size if gated else q_size)
        self.k_proj = column(hidden_size, kv_size, segments=kv_segments)
        self.v_proj = column(hidden_size, kv_size, segments=kv_segments)
        self.o_proj = build(q_size, hidden_size, parallel_mode="row", bias=bias is True)
        self.clip, self.gated = clip, gated
        self.q_norm = norm and norm(self.head_dim, device=device, dtype=dtype)
        self.k_norm = norm and norm(self.head_dim, device=device, dtype=dtype)
        if projection_norm_eps is not None:
            if norm is not None:
                raise ValueError(
                    f"projection_norm_eps={projection_norm_eps} must be None beside norm"
                )
            whole = partial(
                ProjectionNorm, eps=projection_norm_eps, group=tp, device=device, dtype=dtype
            )
            self.q_norm, self.k_norm = whole(q_size), whole(kv_size, segments=kv_segments)
        self.rotary = rotary
        self.cached_heads = CachedHeads()
        # The product's own scale is the default one.
        self.query_scale = None if scale is None else scale * self.head_dim**0.5
        self.dropout = dropout or Dropout(0.0)
        self.window = (None, None) if window is None else window
        self.soft_cap, self.backend = soft_cap, backend
        check_backend(backend)
        AttentionSpec(window=self.window, soft_cap=soft_cap)
        self.register_parameter("sinks", None)
        if sinks:
            own = self.heads.stop - self.heads.start
            self.sinks = nn.Parameter(torch.empty(own, device=device, dtype=dtype))
            mark(self, "sinks", ShardSpec(0, tp))
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None, prefix: str = "") -> None:
        """Set sinks to zero, whatever the seed."""
        if self.sinks is not None:
            self.sinks.zero_()

    def forward(
        self,
        x_TH: Tensor,
        *,
        positions: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cu_seqlens_padded: Tensor | None = None,
        tables: tuple[Tensor, Tensor] | None = None,
        norms: Norms | None = None,
        dropout_index: Tensor | None = None,
    ) -> Tensor:
        """Attend over each row, or over each document of one row.

        Args:
            x_TH: Input [... T H]; one row, [T H] or [1 T H], with documents.
            positions: Every token's position [T] or [... T]; all T tokens also under
                sequence parallelism.
            cu_seqlens: Sums of the documents' lengths, from 0 [E+1]; ``None``: rows are whole.
            max_seqlen: Length of the longest document, for back ends that ask for it.
            cu_seqlens_padded: Where documents are stored, if pads lie between them [E+1].
            tables: ``rotary(positions)``, if a model has computed them for all its layers.
            norms: ``on_part(q_norm, k_norm)``, if a block has them in one message with others.
            dropout_index: ``DropoutKey.index`` of all T tokens [... T], if probabilities drop.

        Raises:
            ValueError: ``positions`` are not those of T tokens, ``dropout_index`` is missing, or
                see ``attention``.
        """
        q, k, v = apply_each(x_TH, self.q_proj, self.k_proj, self.v_proj)
        gate = None
        if self.gated:
            q, gate = (
                part.flatten(-2) for part in q.unflatten(-1, (-1, 2, self.head_dim)).unbind(-2)
            )
        q, k, v = self._in_heads(q, k, v)
        if positions.shape[-1] != q.shape[-3]:
            raise ValueError(
                f"positions has {positions.shape[-1]} tokens and must have {q.shape[-3]}"
            )
        if self.head_norms:
            q_norm, k_norm = norms or on_part(*self.head_norms, group=self.tp)
            q, k = q_norm(q), k_norm(k)
        if self.clip is not None:
            q, k, v = (y.clamp(-self.clip, self.clip) for y in (q, k, v))
        if self.rotary is not None:
            cos_Tr, sin_Tr = tables or self.rotary(positions, dtype=q.dtype)
            q, k = rotate(q, cos_Tr, sin_Tr), rotate(k, cos_Tr, sin_Tr)
        k, v = self.cached_heads(k, v)
        q = q if self.query_scale is None else q * self.query_scale
        rows = q.shape[:-3]
        q, k, v = (y.reshape(-1, *y.shape[-3:]) for y in (q, k, v))
        spec = AttentionSpec(
            cu_seqlens=cu_seqlens,
            max_seqlen=None if cu_seqlens is None else max_seqlen,
            cu_seqlens_padded=cu_seqlens_padded,
            window=self.window,
            soft_cap=self.soft_cap,
            sinks=self.sinks,
            dropout=self._dropped(dropout_index) if self.dropout.drops else None,
        )
        y = attention(q, k, v, spec, backend=self.backend)
        y = y.reshape(*rows, y.shape[1], -1)
        return self.o_proj(y if gate is None else y * gate.sigmoid())

    @property
    def head_norms(self) -> list[nn.Module]:
        """Those of query and key heads, whose weights every rank holds; none or two."""
        found = [norm for norm in (self.q_norm, self.k_norm) if norm is not None]
        return [norm for norm in found if not isinstance(norm, ProjectionNorm)]

    def _in_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values by head, normalised if norms are over whole projections."""
        if isinstance(self.q_norm, ProjectionNorm) and isinstance(self.k_norm, ProjectionNorm):
            q, k = normalise((self.q_norm, q), (self.k_norm, k))
        return tuple(y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))

    def _dropped(self, dropout_index: Tensor | None) -> Dropped:
        index_Tn = index_of_heads(self.dropout.required(dropout_index), self.heads)
        index_BTn = index_Tn.reshape(-1, *index_Tn.shape[-2:])
        return Dropped(self.dropout.p, self.dropout.stream, index_BTn)


def _head_dim(hidden_size: int, num_heads: int, head_dim: int | None) -> int:
    if head_dim is None and hidden_size % num_heads:
        raise ValueError(
            f"num_heads={num_heads} must divide hidden_size={hidden_size}, or head_dim be given"
        )
    return hidden_size // num_heads if head_dim is None else head_dim


def _kv_segments(
    num_heads: int, num_kv_heads: int, head_dim: int, tp: Group
) -> tuple[Segment, ...]:
    """How key and value features are cut: no rank holds a part of a head."""
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads={num_kv_heads} must divide num_heads={num_heads}")
    if num_kv_heads % tp.size and tp.size % num_kv_heads:
        raise ValueError(
            f"num_kv_heads={num_kv_heads} must divide evenly over a group of {tp.size} ranks, "
            f"or divide {tp.size}"
        )
    return (Segment(num_kv_heads * head_dim, parts=min(num_kv_heads, tp.size)),)
