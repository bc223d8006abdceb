"""Specs of common models in a few arguments; every other feature is a field of ``DecoderSpec``.

``Decoder(gpt(...), mesh=mesh)`` is the model; ``dataclasses.replace`` changes a field.
"""

from __future__ import annotations

from collections.abc import Mapping

from megablocks_core.layers.spec import DecoderSpec, DeltaSpec, Mamba2Spec, MoESpec
from megablocks_core.layers.spec.pattern import ATTENTION, MAMBA, blocks_of, pattern_of_ratios
from megablocks_core.parallel.checks import check_whole


def gpt(
    vocab_size: int,
    *,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int | None = None,
    ffn_size: int | None = None,
) -> DecoderSpec:
    """Attention and a gated feed-forward layer in every block, as in Llama.

    Args:
        vocab_size: Number of tokens.
        hidden_size: Width of the residual stream.
        num_layers: Blocks.
        num_heads: Query heads.
        num_kv_heads: Key and value heads; default ``num_heads``.
        ffn_size: Width of the feed-forward layers; default 8/3 of ``hidden_size``, rounded up to a
            multiple of 16.

    Raises:
        ValueError: A size is no whole number from 1 on, or heads do not divide evenly.
    """
    _check_heads(hidden_size, num_heads)
    check_whole("num_layers", num_layers, least=1)
    wide = -(-8 * hidden_size // 48) * 16 if ffn_size is None else ffn_size
    heads = num_heads if num_kv_heads is None else num_kv_heads
    return DecoderSpec(
        vocab_size, hidden_size, wide, num_layers, num_heads, heads, hidden_size // num_heads
    )


def mamba(
    vocab_size: int, *, hidden_size: int, num_layers: int, state_size: int = 128, head_dim: int = 64
) -> DecoderSpec:
    """Mamba-2 in every block, of an inner width of twice ``hidden_size``.

    Args:
        vocab_size: Number of tokens.
        hidden_size: Width of the residual stream.
        num_layers: Blocks.
        state_size: Features of the state, of each feature of a head.
        head_dim: Features of a head.

    Raises:
        ValueError: A size is no whole number from 1 on, or heads do not divide the inner width.
    """
    sizes = {"hidden_size": hidden_size, "num_layers": num_layers, "head_dim": head_dim}
    for name, size in sizes.items():
        check_whole(name, size, least=1)
    if 2 * hidden_size % head_dim:
        raise ValueError(f"head_dim={head_dim} must divide 2 * hidden_size={2 * hidden_size}")
    return DecoderSpec(
        vocab_size,
        hidden_size,
        0,
        num_layers,
        0,
        0,
        0,
        pattern=MAMBA * num_layers,
        mamba=Mamba2Spec(2 * hidden_size // head_dim, head_dim, state_size),
        rope=False,
        norm_eps=1e-5,
        family="mamba2",
    )


def hybrid(
    vocab_size: int,
    pattern: str | Mapping[str, float],
    *,
    hidden_size: int,
    num_layers: int | None = None,
    num_heads: int = 0,
    num_kv_heads: int | None = None,
    ffn_size: int = 0,
    mamba: Mamba2Spec | None = None,
    delta: DeltaSpec | None = None,
    moe: MoESpec | None = None,
) -> DecoderSpec:
    """One mixer a block, in the order of a pattern, as in Nemotron-H.

    Attention does not turn by positions, and feed-forward layers are squared ReLUs without a gate.

    Args:
        vocab_size: Number of tokens.
        pattern: One letter a block ("M-M*-"), see ``layers.spec.pattern``; or each letter's share
            of ``num_layers`` blocks, of which the others are Mamba blocks.
        hidden_size: Width of the residual stream.
        num_layers: Blocks, if shares are given.
        num_heads: Query heads, if there is attention.
        num_kv_heads: Key and value heads; default ``num_heads``.
        ffn_size: Width of the feed-forward layers, if there are any.
        mamba: Of the Mamba blocks.
        delta: Of the gated delta nets.
        moe: Of the mixtures of experts.

    Raises:
        ValueError: ``pattern`` is neither, shares come without ``num_layers``, or what the pattern
            has and the other arguments do not agree.
    """
    if not isinstance(pattern, str):
        if not isinstance(pattern, Mapping):
            raise ValueError(f"pattern={pattern!r} must be a string, or shares by letter")
        if num_layers is None:
            raise ValueError("num_layers=None must be given where pattern has shares")
        pattern = pattern_of_ratios(num_layers, pattern)
    blocks = blocks_of(pattern)
    attends = ATTENTION in blocks
    if attends:
        _check_heads(hidden_size, num_heads)
    return DecoderSpec(
        vocab_size,
        hidden_size,
        ffn_size,
        len(blocks) if num_layers is None else num_layers,
        num_heads,
        num_heads if num_kv_heads is None else num_kv_heads,
        hidden_size // num_heads if attends else 0,
        pattern=pattern,
        mamba=mamba,
        delta=delta,
        moe=moe,
        rope=False,
        gated_mlp=False,
        activation="relu2",
        norm_eps=1e-5,
        family="nemotron_h",
    )


def _check_heads(hidden_size: int, num_heads: int) -> None:
    check_whole("hidden_size", hidden_size, least=1)
    check_whole("num_heads", num_heads, least=1)
    if hidden_size % num_heads:
        raise ValueError(f"num_heads={num_heads} must divide hidden_size={hidden_size}")
