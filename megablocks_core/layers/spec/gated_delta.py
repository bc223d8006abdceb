"""Configs of models that have gated delta nets in most layers and attention in the others."""

from __future__ import annotations

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


def _in_turn(count: int, every: int) -> list[str]:
    return [
        "linear_attention" if number % every else "full_attention" for number in range(1, count + 1)
    ]


GATED_DELTA = {
    "qwen3_next": HybridFamily(
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
    ),
}
