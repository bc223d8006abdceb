"""What configs of models with state-space blocks say; read and written by the same tables.

A table gives the field of each entry: one of ``DecoderSpec``, or after "mamba." and "moe." one of
its parts.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megablocks_core.layers.spec.block_lists import (
    read_count,
    read_pairs,
    read_singles,
    write_count,
    write_layer_types,
    write_places,
    write_singles,
)
from megablocks_core.layers.spec.entries import (
    KEPT,
    KEPT_OF_EXPERTS,
    Entries,
    rope,
    share_of,
    share_turned,
)
from megablocks_core.layers.spec.gated_delta import GATED_DELTA
from megablocks_core.layers.spec.hybrid_family import HybridFamily, Values
from megablocks_core.layers.spec.mixer_specs import DeltaSpec, Mamba1Spec, Mamba2Spec
from megablocks_core.layers.spec.moe_spec import MoESpec
from megablocks_core.layers.spec.pattern import ATTENTION, EXPERTS, FEED_FORWARD, MAMBA
from megablocks_core.layers.spec.state_spaces import MAMBA1, MAMBA2, write_state_spaces

if TYPE_CHECKING:
    from megablocks_core.layers.spec.decoder_spec import DecoderSpec


def read_hybrid(name: str, entries: Entries) -> Values:
    """The fields of a spec, from the entries of a config of family ``name``.

    Raises:
        ValueError: An entry is missing, or asks for what a ``Decoder`` does not have.
    """
    family = HYBRIDS[name]
    for key, value in family.defaults.items():
        if key not in entries.null:
            entries.default(key, value)
    pattern = family.read_pattern(entries)
    family.derive(entries)
    used = family.used(pattern)
    values = {path: entries.need(key) for key, path in used.items() if key not in _MAY_BE_NULL}
    values |= {path: entries.take(key) for key, path in used.items() if key in _MAY_BE_NULL}
    for key in (*family.every_entry(), *_OF_TRAINING):
        entries.take(key)
    turns = _read_turns(entries, family, values.get("head_dim", 0))
    kept = (*KEPT, *KEPT_OF_EXPERTS, "pad_token_id")
    extra = {key: entries.take(key) for key in kept if key in entries}
    entries.finish(dict(family.required))
    return {
        **_no_sizes(pattern),
        **family.fixed,
        **{path: value for path, value in values.items() if "." not in path},
        "mamba": _part(family.mamba, "mamba.", values),
        "delta": _part(DeltaSpec, "delta.", values),
        "moe": _part(MoESpec, "moe.", values, **family.of_experts),
        **turns,
        "family": name,
        "pattern": pattern,
        "extra": extra,
    }


def write_hybrid(spec: DecoderSpec) -> Values:
    """The entries that ``read_hybrid`` reads.

    Raises:
        ValueError: A feature that configs of this family cannot name.
    """
    family, pattern = HYBRIDS[spec.family], spec.pattern or ""
    used = family.used(pattern)
    config: Values = {
        "architectures": [family.architecture],
        "model_type": spec.family,
        **family.write_pattern(pattern),
        **{key: _field(spec, path) for key, path in used.items()},
        **family.required,
        **_written_turns(spec, family),
        **spec.extra,
    }
    if family.expand:
        config[family.expand] = _expand(spec)
    if spec.family == "nemotron_h" and isinstance(spec.mamba, Mamba2Spec):
        config["time_step_min"] = spec.mamba.time_step_limit[0]
    again = type(spec)(**read_hybrid(spec.family, Entries({**config, "model_type": None})))
    for name in spec.__dataclass_fields__:
        value, only = getattr(spec, name), getattr(again, name)
        if value != only:
            raise ValueError(f"{name}={value!r} must be {only!r} in a config of {spec.family!r}")
    if spec.family in (MAMBA1, MAMBA2):
        config = write_state_spaces(config)
    return {key: list(v) if isinstance(v, tuple) else v for key, v in config.items()}


def _no_sizes(pattern: str) -> Values:
    """Sizes of blocks that there may not be."""
    heads = ("num_heads", "num_kv_heads", "head_dim")
    return {"num_layers": len(pattern), "ffn_size": 0, **dict.fromkeys(heads, 0)}


def _part(kind: type[Any] | None, prefix: str, values: Values, **fixed: Any) -> Any:
    """A part of a spec; ``None`` if no entry is of it."""
    own = {path.removeprefix(prefix): v for path, v in values.items() if path.startswith(prefix)}
    return kind(**own, **fixed) if kind and own else None


def _field(spec: DecoderSpec, path: str) -> Any:
    """A field of a spec or of its parts."""
    part, _, name = path.rpartition(".")
    return getattr(getattr(spec, part) if part else spec, name)


def _expand(spec: DecoderSpec) -> int:
    """How much wider Mamba blocks are inside."""
    mamba = spec.mamba
    if isinstance(mamba, Mamba1Spec):
        inner = mamba.inner_size
    else:
        inner = 0 if mamba is None else mamba.num_heads * mamba.head_dim
    if inner % spec.hidden_size:
        raise ValueError(
            f"mamba={mamba} must be some times as wide as hidden_size={spec.hidden_size} in a "
            f"config of {spec.family!r}"
        )
    return inner // spec.hidden_size


def _read_turns(entries: Entries, family: HybridFamily, head_dim: int) -> Values:
    """How attention turns queries and keys, if it does."""
    asked = entries.take("position_embedding_type") == "rope" or not family.asks
    if not (family.turned and head_dim and asked):
        for key in ("rope_theta", "rope_scaling", "rope_parameters"):
            entries.take(key)
        return {"rope": False}
    share = family.turned
    if family.any_share:
        share = share_turned(entries, family.turned)
    width = {} if share == 1 else {"rotary_dim": int(head_dim * share)}
    return rope(entries, whole=share) | width


def _written_turns(spec: DecoderSpec, family: HybridFamily) -> Values:
    if not spec.rope:
        return {}
    scaling = None if spec.rope_scaling is None else dict(spec.rope_scaling)
    asks: Values = {"position_embedding_type": "rope"} if family.asks else {}
    if family.any_share and spec.head_dim:
        asks[_SHARE] = share_of(spec.rotary_dim or spec.head_dim, spec.head_dim)
    return {"rope_theta": spec.rope_base, "rope_scaling": scaling, **asks}


def _derive_mamba(entries: Entries) -> None:
    hidden = entries.peek("hidden_size") or 0
    entries.default("intermediate_size", int(entries.take("expand", 2) * hidden))
    if entries.peek("time_step_rank") in (None, "auto"):
        entries.take("time_step_rank")
        entries.default("time_step_rank", math.ceil(hidden / 16))


def _derive_mamba2(entries: Entries) -> None:
    entries.take("time_step_rank")
    entries.take("intermediate_size")
    _check_expand(entries, "expand", "num_heads", "head_dim")


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
    _check_expand(entries, "mamba_expand", "mamba_n_heads", "mamba_d_head")


def _check_expand(entries: Entries, expand: str, heads: str, width: str) -> None:
    factor, hidden = entries.take(expand), entries.peek("hidden_size")
    if factor is not None and factor * hidden != entries.peek(heads) * entries.peek(width):
        raise ValueError(
            f"{expand}={factor} times hidden_size={hidden} must be {heads}={entries.peek(heads)} "
            f"times {width}={entries.peek(width)}"
        )


_UNTIED = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "initializer_range": "initializer_range",
}
_COMMON = {**_UNTIED, "tie_word_embeddings": "tied"}
# Embeddings of other families treat the token of pads as any other.
_PADDED = {**_COMMON, "pad_token_id": "pad_token_id"}
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
_DEFAULTS_OF_MAMBA = {
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.1,
    "residual_in_fp32": True,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "expand": 2,
}
_MAY_BE_NULL = {"pad_token_id"}
# The share of a head's features that are turned.
_SHARE = "partial_rotary_factor"
# Entries that say how a model was trained at first, or how fast it runs.
_OF_TRAINING = (
    "mamba_ssm_cache_dtype",
    "moe_shared_expert_overlap",
    "mtp_layers_block_type",
    "num_logits_to_keep",
    "rescale_prenorm_residual",
    "time_step_floor",
    "time_step_init_scheme",
    "time_step_max",
    "time_step_min",
    "time_step_scale",
    "use_associative_scan",
    "use_mamba_kernels",
    "use_mambapy",
    "z_loss_coefficient",
)

HYBRIDS = {
    "mamba": HybridFamily(
        "MambaForCausalLM",
        Mamba1Spec,
        read_count,
        write_count,
        {
            "": {
                **_COMMON,
                "layer_norm_epsilon": "norm_eps",
                "residual_in_fp32": "float32_residual",
                "intermediate_size": "mamba.inner_size",
                "state_size": "mamba.state_size",
                "time_step_rank": "mamba.dt_rank",
                "conv_kernel": "mamba.conv_kernel",
                "use_bias": "mamba.bias",
                "use_conv_bias": "mamba.conv_bias",
            }
        },
        {**_DEFAULTS_OF_MAMBA, "state_size": 16, "tie_word_embeddings": True},
        required={"hidden_act": "silu"},
        derive=_derive_mamba,
    ),
    "mamba2": HybridFamily(
        "Mamba2ForCausalLM",
        Mamba2Spec,
        read_count,
        write_count,
        {
            "": {
                **_COMMON,
                "layer_norm_epsilon": "norm_eps",
                "residual_in_fp32": "float32_residual",
                "num_heads": "mamba.num_heads",
                "head_dim": "mamba.head_dim",
                "state_size": "mamba.state_size",
                "n_groups": "mamba.num_groups",
                "conv_kernel": "mamba.conv_kernel",
                "chunk_size": "mamba.chunk_size",
                "use_bias": "mamba.bias",
                "use_conv_bias": "mamba.conv_bias",
                "time_step_limit": "mamba.time_step_limit",
            }
        },
        {
            **_DEFAULTS_OF_MAMBA,
            "num_heads": 128,
            "head_dim": 64,
            "state_size": 128,
            "n_groups": 8,
            "chunk_size": 256,
            "time_step_limit": (0.0, math.inf),
            "tie_word_embeddings": False,
        },
        required={"hidden_act": "silu"},
        derive=_derive_mamba2,
    ),
    "nemotron_h": HybridFamily(
        "NemotronHForCausalLM",
        Mamba2Spec,
        read_singles,
        write_singles,
        {
            "": {**_UNTIED, "layer_norm_epsilon": "norm_eps", "mlp_hidden_act": "activation"},
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
    ),
    "bamba": HybridFamily(
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
    ),
    "granitemoehybrid": HybridFamily(
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
    ),
}

HYBRIDS |= GATED_DELTA
# The same models with the configs of their authors.
HYBRIDS |= {
    MAMBA1: replace(HYBRIDS["mamba"], architecture="MambaLMHeadModel"),
    MAMBA2: replace(HYBRIDS["mamba2"], architecture="MambaLMHeadModel"),
}
