"""Configs of models that have gated delta nets in most layers and attention in the others.

Qwen3-Next, and the language models of Qwen3.5, in which all layers have experts or none has.
"""

from __future__ import annotations

from dataclasses import replace

from megablocks_core.layers.spec.entries import Entries
from megablocks_core.layers.spec.hybrid_family import HybridFamily, Values
from megablocks_core.layers.spec.pattern import (
    ATTENTION,
    DELTA,
    EXPERTS,
    FEED_FORWARD,
    blocks_of,
)

_KINDS = {"linear_attention": DELTA, "full_attention": ATTENTION}
_NAMES = {letter: name for name, letter in _KINDS.items()}
# Each fourth layer attends if a config does not say otherwise.
_EVERY = 4


def read_layers(entries: Entries) -> str:
    """A pattern of pairs: a delta net or attention, then a feed-forward layer or experts."""
    count = entries.need("num_hidden_layers")
    every = entries.take("full_attention_interval", _EVERY)
    names = entries.take("layer_types") or _in_turn(count, every)
    if len(names) != count or set(names) - set(_KINDS):
        raise ValueError(f"layer_types={names} must name {count} of {', '.join(_KINDS)}")
    step, dense = entries.take("decoder_sparse_step", 1), entries.take("mlp_only_layers", ())
    sparse = [
        bool(entries.peek("num_experts")) and (number + 1) % step == 0 and number not in dense
        for number in range(count)
    ]
    return "".join(
        _KINDS[name] + (EXPERTS if has else FEED_FORWARD)
        for name, has in zip(names, sparse, strict=True)
    )


def write_layers(pattern: str) -> Values:
    """The inverse of ``read_layers``."""
    blocks = blocks_of(pattern)
    mixers, seconds = blocks[::2], blocks[1::2]
    kinds = set(mixers) - set(_NAMES) | set(seconds) - {FEED_FORWARD, EXPERTS}
    if len(mixers) != len(seconds) or kinds:
        raise ValueError(
            f"pattern={pattern!r} must be of pairs here: a gated delta net or attention, then a "
            "feed-forward layer or experts"
        )
    names = [_NAMES[letter] for letter in mixers]
    count = len(names)
    intervals = [every for every in range(1, count + 2) if _in_turn(count, every) == names]
    return {
        "num_hidden_layers": count,
        "layer_types": names,
        "mlp_only_layers": [n for n, letter in enumerate(seconds) if letter == FEED_FORWARD],
        **({} if EXPERTS in seconds else {"num_experts": 0}),
        # Some readers of configs know this entry alone.
        **({"full_attention_interval": intervals[0]} if intervals else {}),
    }


def _read_alike(entries: Entries) -> str:
    """As ``read_layers``, of configs without entries for single layers."""
    _refuse(entries, "decoder_sparse_step", "mlp_only_layers")
    return read_layers(entries)


def _read_dense(entries: Entries) -> str:
    """As ``_read_alike``, of configs without experts."""
    _refuse(entries, "num_experts")
    return _read_alike(entries)


def _refuse(entries: Entries, *keys: str) -> None:
    for key in keys:
        if found := entries.peek(key):
            raise ValueError(f"{key}={found} must be absent: all layers are alike here")


def _write_alike(pattern: str) -> Values:
    """The inverse of ``_read_alike``; a pattern with exceptions does not read alike."""
    of_single = ("mlp_only_layers", "num_experts")
    return {key: value for key, value in write_layers(pattern).items() if key not in of_single}


def _straighten(entries: Entries) -> None:
    """Sections of positions matter where these are of images: those of a text are equal."""
    for name in ("rope_parameters", "rope_scaling"):
        if stated := entries.take(name):
            of_images = ("mrope_section", "mrope_interleaved")
            entries.default(name, {k: v for k, v in stated.items() if k not in of_images})


def _in_turn(count: int, every: int) -> list[str]:
    return [
        "linear_attention" if number % every else "full_attention" for number in range(1, count + 1)
    ]


_QWEN3_NEXT = HybridFamily(
    "Qwen3NextForCausalLM",
    None,
    read_layers,
    write_layers,
    {
        "": {
            "vocab_size": "vocab_size",
            "hidden_size": "hidden_size",
            "initializer_range": "initializer_range",
            "tie_word_embeddings": "tied",
            "pad_token_id": "pad_token_id",
            "rms_norm_eps": "norm_eps",
        },
        DELTA: {
            "linear_num_key_heads": "delta.num_key_heads",
            "linear_num_value_heads": "delta.num_value_heads",
            "linear_key_head_dim": "delta.key_dim",
            "linear_value_head_dim": "delta.value_dim",
            "linear_conv_kernel_dim": "delta.conv_kernel",
        },
        ATTENTION: {
            "num_attention_heads": "num_heads",
            "num_key_value_heads": "num_kv_heads",
            "attention_dropout": "attention_dropout",
            "attention_bias": "attention_bias",
            "head_dim": "head_dim",
        },
        FEED_FORWARD: {"intermediate_size": "ffn_size"},
        EXPERTS: {
            "num_experts": "moe.num_experts",
            "num_experts_per_tok": "moe.top_k",
            "moe_intermediate_size": "moe.ffn_size",
            "norm_topk_prob": "moe.renormalize",
            "shared_expert_intermediate_size": "moe.shared_ffn_size",
        },
    },
    {
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "attention_dropout": 0.0,
        "attention_bias": False,
        "head_dim": 256,
        "intermediate_size": 5632,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "shared_expert_intermediate_size": 512,
    },
    {"qk_norm": True, "gated_attention": True, "zero_centered_norms": True},
    {"shared_gate": True},
    {"hidden_act": "silu"},
    expand="",
    turned=0.25,
    any_share=True,
)
_OF_EXPERTS = dict(_QWEN3_NEXT.fields[EXPERTS])
_WITHOUT_EXPERTS = {
    key: value for key, value in _QWEN3_NEXT.defaults.items() if key not in _OF_EXPERTS
}
GATED_DELTA = {
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_text": replace(
        _QWEN3_NEXT,
        architecture="Qwen3_5ForCausalLM",
        read_pattern=_read_dense,
        write_pattern=_write_alike,
        fields={kind: own for kind, own in _QWEN3_NEXT.fields.items() if kind != EXPERTS},
        defaults={**_WITHOUT_EXPERTS, "intermediate_size": 12288, "num_key_value_heads": 4},
        derive=_straighten,
    ),
    "qwen3_5_moe_text": replace(
        _QWEN3_NEXT,
        architecture="Qwen3_5MoeForCausalLM",
        read_pattern=_read_alike,
        write_pattern=_write_alike,
        defaults={**_QWEN3_NEXT.defaults, "num_experts": 256, "num_experts_per_tok": 8},
        derive=_straighten,
    ),
}
