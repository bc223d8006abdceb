"""``config.json`` of a TensorRT-LLM checkpoint, from Hugging Face's words and back to these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megablocks_core.export.trtllm.mapping import Mapping as Ranks
from megablocks_core.export.trtllm.model import GEMMAS, Config, Model
from megablocks_core.export.trtllm.tensors import padded_vocab

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GPTForCausalLM": "gpt2",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "MambaForCausalLM": "mamba2",
}
_NAMES = {family: name for name, family in ARCHITECTURES.items()}
# What transformers takes an absent entry for.
_ABSENT: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072},
    "mixtral": {
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_experts_per_tok": 2,
    },
    "qwen2": {"max_position_embeddings": 32768},
    "qwen3": {"max_position_embeddings": 32768},
    "qwen3_moe": {"max_position_embeddings": 32768, "num_experts_per_tok": 8},
    "gemma": {"max_position_embeddings": 8192},
    "gemma2": {
        "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 256,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
        "sliding_window": 4096,
    },
    "gemma3_text": {
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    },
}
# Kinds of rotary scaling that attention of TensorRT-LLM computes, and what each is told by.
_SCALINGS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
_GPT2_ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu"}
_PATTERN = 6  # of Gemma 3: every sixth layer sees all


def config_of(
    model: Model, ranks: Ranks, dtype: torch.dtype, quantization: Mapping[str, Any]
) -> dict[str, Any]:
    """The entries of ``config.json``.

    ``vocab_size`` is the real one: a runtime computes the padded one itself, and cuts logits of
    what is beyond the real one off before it samples. ``vocab_size_padded`` says it to readers.

    Raises:
        ValueError: The config asks for what the format cannot say.
    """
    known = {"rms_norm_eps": 1e-6, "rope_theta": 1e4, **_ABSENT.get(model.family, {})}
    known |= {name: value for name, value in model.config.items() if value is not None}
    own = {"gpt2": _gpt2, "mamba2": _mamba2}.get(model.family, _decoder)(model, known, ranks)
    return {
        "producer": {"name": "megablocks_core"},
        "architecture": _NAMES[model.family],
        "dtype": str(dtype).removeprefix("torch."),
        "logits_dtype": "float32",
        "vocab_size": model.vocab,
        "vocab_size_padded": padded_vocab(model, ranks.tp),
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        **own,
        "mapping": {
            "world_size": ranks.size,
            "tp_size": ranks.tp,
            "pp_size": ranks.pp,
            "cp_size": 1,
            "moe_tp_size": ranks.moe_tp,
            "moe_ep_size": ranks.moe_ep,
            "gpus_per_node": 8,
        },
        "quantization": dict(quantization),
    }


def _attention(model: Model) -> dict[str, Any]:
    return {
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_size": model.head,
        "intermediate_size": model.ffn,
        "use_parallel_embedding": True,
        "embedding_sharding_dim": 0,
        "share_embedding_table": model.family in GEMMAS,
    }


def _decoder(model: Model, known: Config, _: Ranks) -> dict[str, Any]:
    family = model.family
    base, scaling = _rotary(family, known)
    found = {
        **_attention(model),
        "hidden_act": _activation(model, known),
        "norm_epsilon": known["rms_norm_eps"],
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": known["max_position_embeddings"],
        "rotary_base": base,
        "rotary_scaling": scaling,
        "rotary_pct": 1.0,
        "attn_bias": family == "qwen2" or bool(known.get("attention_bias")),
        "mlp_bias": bool(known.get("mlp_bias")),
        "qk_layernorm": family in ("qwen3", "qwen3_moe", "gemma3_text"),
    }
    if family.startswith("qwen"):
        found |= {"qwen_type": family, "use_logn_attn": False}
    else:
        found["residual_mlp"] = False
    if model.experts:
        found["moe"] = _experts(model, known)
        if family == "qwen3_moe":
            found["intermediate_size"] = known["intermediate_size"]
            found |= {"moe_intermediate_size": model.ffn, "moe_shared_expert_intermediate_size": 0}
    if family in ("gemma2", "gemma3_text"):
        found |= _gemma(model, known)
    return found


def _experts(model: Model, known: Config) -> dict[str, Any]:
    renormalised = model.family == "mixtral" or bool(known.get("norm_topk_prob", False))
    top_k = known["num_experts_per_tok"]
    return {"num_experts": model.experts, "top_k": top_k, "normalization_mode": int(renormalised)}


def _activation(model: Model, known: Config) -> str:
    if model.family in GEMMAS:
        name = known.get("hidden_activation", known.get("hidden_act", "gelu_pytorch_tanh"))
        # The first configs of Gemma say "gelu", and its authors compute this.
        served = {"gelu_pytorch_tanh": "gelu_pytorch_tanh", "gelu": "gelu_pytorch_tanh"}
    else:
        name = known.get("hidden_act", "silu")
        served = {"silu": "swiglu" if model.experts else "silu"}
    return _served(name, served, "hidden_act")


def _served(name: Any, served: Mapping[str, str], entry: str) -> str:
    if name not in served:
        raise ValueError(f"{entry}={name!r} of the config must be one of {', '.join(served)}")
    return served[name]


def _rotary(family: str, known: Config) -> tuple[float, dict[str, Any] | None]:
    """The base and the scaling, from transformers 5's entry or the two older ones.

    Raises:
        ValueError: TensorRT-LLM does not compute the scaling, or a number of it is missing.
    """
    given = {**(known.get("rope_scaling") or {}), **(known.get("rope_parameters") or {})}
    if family == "gemma3_text" and "full_attention" in given:
        given = dict(given["full_attention"])
    base = given.pop("rope_theta", known["rope_theta"])
    kind = given.pop("rope_type", given.pop("type", "default"))
    given.pop("type", None)
    if kind == "default":
        return base, None
    if kind not in _SCALINGS:
        raise ValueError(f"rope_type={kind!r} of the config must be one of {', '.join(_SCALINGS)}")
    if missing := [name for name in _SCALINGS[kind] if given.get(name) is None]:
        raise ValueError(f"rope_scaling={given} of the config must have {missing} for {kind}")
    numbers = {name: given[name] for name in _SCALINGS[kind]}
    # Older versions read the first word, newer ones either.
    return base, {"type": kind, "rope_type": kind, **numbers}


def _gemma(model: Model, known: Config) -> dict[str, Any]:
    names = ("query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping")
    found = {name: known.get(name) for name in names} | {"sliding_window": known["sliding_window"]}
    if model.family == "gemma2":
        return {**found, "inter_layernorms": True}
    given = (known.get("rope_parameters") or {}).get("sliding_attention", {})
    local = given.get("rope_theta", known.get("rope_local_base_freq", 1e4))
    if given.get("rope_type", "default") != "default":
        raise ValueError(f"rope_parameters of sliding_attention must have no scaling, not {given}")
    pattern = known.get("sliding_window_pattern", known.get("_sliding_window_pattern", _PATTERN))
    kinds = [
        "full_attention" if (layer + 1) % pattern == 0 else "sliding_attention"
        for layer in range(model.layers)
    ]
    if known.get("layer_types", kinds) != kinds:
        raise ValueError(f"layer_types must be full_attention every {pattern} layers alone")
    return {
        **found,
        "inter_layernorms": True,
        "rope_local_base_freq": local,
        "_sliding_window_pattern": pattern,
    }


def _gpt2(model: Model, known: Config, _: Ranks) -> dict[str, Any]:
    activation = known.get("activation_function", "gelu_new")
    return {
        **_attention(model),
        "hidden_act": _served(activation, _GPT2_ACTIVATIONS, "activation_function"),
        "norm_epsilon": known.get("layer_norm_epsilon", 1e-5),
        "position_embedding_type": "learned_absolute",
        "max_position_embeddings": known["n_positions"],
        "bias": True,
        "q_scaling": 1.0,
        "apply_query_key_layer_scaling": False,
    }


def _mamba2(model: Model, known: Config, ranks: Ranks) -> dict[str, Any]:
    if not known.get("use_conv_bias", True):
        raise ValueError("use_conv_bias=False of the config must be True")
    state = known["state_size"]
    return {
        "num_attention_heads": ranks.size,  # what the format asks for where there are none
        "intermediate_size": model.ffn,
        "hidden_act": _served(known.get("hidden_act", "silu"), {"silu": "silu"}, "hidden_act"),
        "norm_epsilon": known.get("layer_norm_epsilon", 1e-5),
        "mamba_version": "Mamba2",
        "rms_norm": True,
        "ssm_rmsnorm": True,
        "residual_in_fp32": known.get("residual_in_fp32", True),
        "pad_vocab_size_multiple": 1,
        "layer_types": ["recurrent"],
        "rnn_hidden_size": model.ffn,
        "rnn_head_size": model.head,
        "rnn_conv_dim_size": model.ffn + 2 * model.kv_heads * state,
        "state_size": state,
        "conv_kernel": known.get("conv_kernel", 4),
        "ngroups": model.kv_heads,
        "chunk_size": known.get("chunk_size", 256),
        "use_bias": bool(known.get("use_bias", False)),
        "use_parallel_embedding": False,
        "embedding_sharding_dim": 0,
    }


def in_hf_words(config: Config) -> dict[str, Any]:
    """What a Hugging Face config would say of the sizes of a checkpoint's model.

    Raises:
        ValueError: The architecture is not known.
        KeyError: An entry is missing.
    """
    name = config.get("architecture")
    if name not in ARCHITECTURES:
        served = ", ".join(ARCHITECTURES)
        raise ValueError(f"architecture={name!r} must be one of {served}")
    family = ARCHITECTURES[name]
    same = ("vocab_size", "hidden_size", "num_hidden_layers")
    found: dict[str, Any] = {"model_type": family} | {key: config[key] for key in same}
    if family == "mamba2":
        inner, head = config["rnn_hidden_size"], config["rnn_head_size"]
        found |= {key: config[key] for key in ("state_size", "conv_kernel", "use_bias")}
        return found | {
            "head_dim": head,
            "num_heads": inner // head,
            "expand": inner / config["hidden_size"],
            "n_groups": config["ngroups"],
        }
    heads, inner = config["num_attention_heads"], config["intermediate_size"]
    if family == "gpt2":
        sizes = {"n_embd": found.pop("hidden_size"), "n_layer": found.pop("num_hidden_layers")}
        positions = config["max_position_embeddings"]
        return found | sizes | {"n_positions": positions, "n_head": heads, "n_inner": inner}
    found |= {
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": config["num_key_value_heads"],
        "head_dim": config["head_size"],
        "attention_bias": family != "qwen2" and bool(config.get("attn_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
        "tie_word_embeddings": family in GEMMAS,
    }
    if "moe" in config:
        found["num_experts"] = config["moe"]["num_experts"]
        found["moe_intermediate_size"] = config.get("moe_intermediate_size", inner)
    return found
