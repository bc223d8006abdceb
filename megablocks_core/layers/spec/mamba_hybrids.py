"""Configs of models that have Mamba-2 beside attention: Nemotron-H, Bamba and Granite 4."""

from __future__ import annotations

import math

from megablocks_core.layers.spec.block_lists import (
    read_pairs,
    read_singles,
    write_layer_types,
    write_places,
    write_singles,
)
from megablocks_core.layers.spec.entries import Entries
from megablocks_core.layers.spec.hybrid_family import COMMON, UNTIED, HybridFamily, check_expand
from megablocks_core.layers.spec.mixer_specs import Mamba2Spec
from megablocks_core.layers.spec.pattern import ATTENTION, EXPERTS, FEED_FORWARD, MAMBA


def _derive_nemotron(entries: Entries) -> None:
    entries.take("expand")  # The product of heads is what its layers have.
    # transformers clamps by the first of these and does not read the second.
    low = entries.take("time_step_min", 0.001)
    entries.take("time_step_limit")
    entries.default("time_step_limit", (low, math.inf))
    shared = entries.take("n_shared_experts", 1)
    if shared != 1:
        raise ValueError(f"n_shared_experts={shared} must be 1")


def _derive_attention_heads(entries: Entries) -> None:
    """Of Bamba and Granite."""
    hidden, heads = entries.need("hidden_size"), entries.peek("num_attention_heads")
    entries.default("hidden_size", hidden)
    if heads:
        entries.default("num_key_value_heads", heads)
        entries.default("head_dim", hidden // heads)
    if entries.peek("mamba_d_head") in (None, "auto"):
        entries.take("mamba_d_head")
        inner = entries.peek("mamba_expand") * hidden
        entries.default("mamba_d_head", inner // entries.peek("mamba_n_heads"))
    check_expand(entries, "mamba_expand", "mamba_n_heads", "mamba_d_head")


# Embeddings of other families treat the token of pads as any other.
_PADDED = {**COMMON, "pad_token_id": "pad_token_id"}
_HEADS = {
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "attention_dropout": "attention_dropout",
    "head_dim": "head_dim",
}
_HEADS = {
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "attention_dropout": "attention_dropout",
    "head_dim": "head_dim",
}
_MAMBA_OF_BAMBA = {
    "mamba_n_heads": "mamba.num_heads",
    "mamba_d_head": "mamba.head_dim",
    "mamba_d_state": "mamba.state_size",
    "mamba_n_groups": "mamba.num_groups",
    "mamba_d_conv": "mamba.conv_kernel",
    "mamba_chunk_size": "mamba.chunk_size",
    "mamba_proj_bias": "mamba.bias",
    "mamba_conv_bias": "mamba.conv_bias",
    "time_step_limit": "mamba.time_step_limit",
}
_DEFAULTS_OF_BAMBA = {
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mamba_expand": 2,
    "mamba_n_heads": 128,
    "mamba_d_state": 256,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 256,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
    "time_step_limit": (0.0, math.inf),
}

_NEMOTRON_H = HybridFamily(
    "NemotronHForCausalLM",
    Mamba2Spec,
    read_singles,
    write_singles,
    {
        "": {**UNTIED, "layer_norm_epsilon": "norm_eps", "mlp_hidden_act": "activation"},
        MAMBA: {
            "mamba_num_heads": "mamba.num_heads",
            "mamba_head_dim": "mamba.head_dim",
            "ssm_state_size": "mamba.state_size",
            "n_groups": "mamba.num_groups",
            "conv_kernel": "mamba.conv_kernel",
            "chunk_size": "mamba.chunk_size",
            "use_bias": "mamba.bias",
            "use_conv_bias": "mamba.conv_bias",
            "time_step_limit": "mamba.time_step_limit",
        },
        ATTENTION: _HEADS,
        FEED_FORWARD: {"intermediate_size": "ffn_size", "mlp_bias": "mlp_bias"},
        EXPERTS: {
            "n_routed_experts": "moe.num_experts",
            "num_experts_per_tok": "moe.top_k",
            "moe_intermediate_size": "moe.ffn_size",
            "moe_shared_expert_intermediate_size": "moe.shared_ffn_size",
            "mlp_bias": "mlp_bias",
            "norm_topk_prob": "moe.renormalize",
            "routed_scaling_factor": "moe.scale",
            "n_group": "moe.num_groups",
            "topk_group": "moe.top_k_groups",
        },
    },
    {
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5,
        "mlp_hidden_act": "relu2",
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "conv_kernel": 4,
        "n_groups": 8,
        "chunk_size": 128,
        "use_bias": False,
        "use_conv_bias": True,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
    },
    {"gated_mlp": False},
    {"score": "sigmoid", "selection_bias": True},
    {
        "mamba_hidden_act": "silu",
        "attention_bias": False,
        "residual_in_fp32": False,
        "tie_word_embeddings": False,  # transformers ties none of them, whatever is said
    },
    derive=_derive_nemotron,
    expand="",
)
_BAMBA = HybridFamily(
    "BambaForCausalLM",
    Mamba2Spec,
    read_pairs,
    write_places,
    {
        "": {
            **_PADDED,
            "rms_norm_eps": "norm_eps",
            "hidden_act": "activation",
            "intermediate_size": "ffn_size",
            "mlp_bias": "mlp_bias",
        },
        MAMBA: _MAMBA_OF_BAMBA,
        ATTENTION: {**_HEADS, "attention_bias": "attention_bias"},
    },
    {
        **_DEFAULTS_OF_BAMBA,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "mlp_bias": False,
        "pad_token_id": 0,
    },
    derive=_derive_attention_heads,
    expand="mamba_expand",
    turned=0.5,
)
_GRANITE = HybridFamily(
    "GraniteMoeHybridForCausalLM",
    Mamba2Spec,
    read_pairs,
    write_layer_types,
    {
        "": {
            **_PADDED,
            "rms_norm_eps": "norm_eps",
            "hidden_act": "activation",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logits_divisor",
        },
        MAMBA: _MAMBA_OF_BAMBA,
        ATTENTION: {
            **_HEADS,
            "attention_bias": "attention_bias",
            "attention_multiplier": "attention_scale",
        },
        FEED_FORWARD: {"shared_intermediate_size": "ffn_size"},
        EXPERTS: {
            "num_local_experts": "moe.num_experts",
            "num_experts_per_tok": "moe.top_k",
            "intermediate_size": "moe.ffn_size",
            "shared_intermediate_size": "moe.shared_ffn_size",
        },
    },
    {
        **_DEFAULTS_OF_BAMBA,
        "rms_norm_eps": 1e-6,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    derive=_derive_attention_heads,
    expand="mamba_expand",
    turned=1.0,
    asks=True,
)

MAMBA_HYBRIDS = {"nemotron_h": _NEMOTRON_H, "bamba": _BAMBA, "granitemoehybrid": _GRANITE}
