"""Floating-point operations of a model, from its sizes and the lengths of its documents.

A multiplication with an addition counts as two. Counted are matrix products, which is what
torch's counter and MFU are about; norms, activations and look-ups are not. A model is a list of
parts, each of which says what its forward pass costs over documents of given lengths; backward
costs twice that. Operations that are done again (recomputation) are no work of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Protocol

from megablocks_core.train.metrics import Mean


class Work(Protocol):
    """A part of a model, as far as its cost goes."""

    def flops(self, lengths: Sequence[int]) -> int:
        """Operations of one forward pass over documents of these lengths."""
        ...


@dataclass(frozen=True)
class LinearWork:
    """A linear layer; ``times`` of them, or one that each token passes as often."""

    in_features: int
    out_features: int
    times: int = 1

    def __post_init__(self) -> None:
        _check_sizes(self)

    def flops(self, lengths: Sequence[int]) -> int:
        """Two for each token and weight."""
        return 2 * sum(lengths) * self.in_features * self.out_features * self.times


@dataclass(frozen=True)
class AttentionWork:
    """Attention with its four projections; a document attends to itself alone.

    Attributes:
        hidden_size: Width of its input and output.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Features of a head.
        window: How many tokens, its own included, a token attends to at most.
        causal: Count only pairs of a token and one that it may attend to. Without it all pairs
            count (with a window: that many a token), as in torch's counter and the usual MFU.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    causal: bool = False

    def __post_init__(self) -> None:
        _check_sizes(self)

    def flops(self, lengths: Sequence[int]) -> int:
        """The projections, and four a pair, head and feature for scores and values."""
        heads = 2 * (self.num_heads + self.num_kv_heads)
        projections = 2 * sum(lengths) * self.hidden_size * heads * self.head_dim
        pairs = sum(map(self._pairs, lengths))
        return projections + 4 * pairs * self.num_heads * self.head_dim

    def _pairs(self, length: int) -> int:
        seen = length if self.window is None else min(length, self.window)
        return seen * (seen + 1) // 2 + (length - seen) * seen if self.causal else length * seen


@dataclass(frozen=True)
class FeedForwardWork:
    """A feed-forward layer of two matrices, or three if it is ``gated``."""

    hidden_size: int
    ffn_size: int
    gated: bool = True

    def __post_init__(self) -> None:
        _check_sizes(self)

    def flops(self, lengths: Sequence[int]) -> int:
        """Two for each token and weight."""
        return 2 * sum(lengths) * self.hidden_size * self.ffn_size * (3 if self.gated else 2)


@dataclass(frozen=True)
class ExpertsWork:
    """A router and the experts that are active: each token passes ``top_k`` and the shared ones.

    Attributes:
        hidden_size: Width of its input and output.
        ffn_size: Width inside one expert.
        num_experts: How many the router chooses from.
        top_k: How many a token is sent to.
        shared_ffn_size: Width inside the experts of all tokens together; 0: none.
        gated: Whether experts have three matrices, not two.
    """

    hidden_size: int
    ffn_size: int
    num_experts: int
    top_k: int
    shared_ffn_size: int = 0
    gated: bool = True

    def __post_init__(self) -> None:
        _check_sizes(self, may_be_zero=("shared_ffn_size",))
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k={self.top_k} must not be above num_experts={self.num_experts}")

    def flops(self, lengths: Sequence[int]) -> int:
        """Two for each token and weight of the router and of the experts it passes."""
        width = self.top_k * self.ffn_size + self.shared_ffn_size
        weights = width * (3 if self.gated else 2) + self.num_experts
        return 2 * sum(lengths) * self.hidden_size * weights


def decoder_work(
    spec: Any,
    *,
    feed_forward: Work | None = None,
    window: int | None = None,
    causal: bool = False,
) -> list[Work]:
    """The parts of a decoder: its blocks and its head, tied or not.

    ``spec`` is a ``layers.DecoderSpec`` or anything with its sizes: ``hidden_size``,
    ``ffn_size``, ``num_layers``, ``num_heads``, ``num_kv_heads``, ``head_dim`` and
    ``vocab_size``. ``feed_forward`` takes the place of its gated feed-forward layers, such as
    ``ExpertsWork``. A model whose blocks differ is a list of your own.
    """
    attention = AttentionWork(
        spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, window, causal
    )
    if feed_forward is None:
        feed_forward = FeedForwardWork(spec.hidden_size, spec.ffn_size)
    return [attention, feed_forward] * spec.num_layers + [
        LinearWork(spec.hidden_size, spec.vocab_size)
    ]


def training_flops(parts: Iterable[Work], lengths: Sequence[int]) -> int:
    """Operations of forward and backward over documents of ``lengths``.

    Of packed documents the lengths are ``cu_seqlens.diff().tolist()``, of a batch of rows
    ``[length] * rows``. The ``flops_per_token`` of a run record is this over ``sum(lengths)``.

    Raises:
        ValueError: A length is negative or no integer.
    """
    try:
        whole = list(map(index, lengths))  # Those of a tensor would wrap around at 32 bits.
    except TypeError:
        raise ValueError(f"lengths={list(lengths)} must be integers") from None
    if any(length < 0 for length in whole):
        raise ValueError(f"lengths={whole} must not be negative")
    return 3 * sum(part.flops(whole) for part in parts)


def mfu(flops: float, *, seconds: float, peak_flops: float) -> Mean:
    """Share of what the devices can do: ``flops`` of all ranks, over ``seconds`` at their peak.

    ``peak_flops`` is that of all devices together. It is a ``Mean``, so steps of different
    lengths pool to the share of their whole time.

    Raises:
        ValueError: ``peak_flops`` is not positive, or ``seconds`` is negative.
    """
    if not peak_flops > 0:
        raise ValueError(f"peak_flops={peak_flops} must be positive")
    if not seconds >= 0:
        raise ValueError(f"seconds={seconds} must not be negative")
    return Mean(flops, seconds * peak_flops)


def _check_sizes(work: Any, may_be_zero: tuple[str, ...] = ()) -> None:
    for name, value in vars(work).items():
        least = 0 if name in may_be_zero else 1
        if value is not None and value is not False and not value >= least:
            raise ValueError(f"{name}={value} must be at least {least}")
