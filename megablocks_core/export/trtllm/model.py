"""What TensorRT-LLM has to know of a model, from the words of a Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megablocks_core.export.families import FAMILIES
from megablocks_core.export.trtllm.mapping import Mapping as Ranks

Config = Mapping[str, Any]
GEMMAS = ("gemma", "gemma2", "gemma3_text")
MIXTURES = ("mixtral", "qwen3_moe")
SERVED = ("llama", "mistral", "qwen2", "qwen3", *MIXTURES, "gpt2", *GEMMAS, "mamba2")
# Entries that change what a model computes, by family, and the values that are served.
_PLAIN: dict[str, tuple[object, ...]] = {
    "partial_rotary_factor": (None, 1, 1.0),
    "use_sliding_window": (None, False),
    "pretraining_tp": (None, 1),
    "scale_attn_by_inverse_layer_idx": (None, False),
    "reorder_and_upcast_attn": (None, False),
    "scale_attn_weights": (None, True),
    "add_cross_attention": (None, False),
    "mlp_only_layers": (None, [], ()),
    "decoder_sparse_step": (None, 1),
    "attn_output_gate": (None, False),
}


@dataclass(frozen=True)
class Model:
    """A model's sizes.

    Attributes:
        family: Its ``model_type``.
        config: The words of Hugging Face, with those that are absent filled in.
        layers: How many there are.
        hidden: Width of the residual stream.
        vocab: Tokens, without padding.
        heads: Heads of queries; of Mamba-2 its own.
        kv_heads: Heads of keys and values.
        head: Width of a head.
        ffn: Width of a feed-forward layer, or of an expert.
        experts: How many a layer has; 0 for none.
    """

    family: str
    config: Config
    layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head: int
    ffn: int
    experts: int = 0


def model_of(config: Config) -> Model:
    """The model of a config, whose sizes the family's table has found to be right.

    Raises:
        ValueError: The family is not served, or an entry asks for what is not.
    """
    name = config.get("model_type")
    if name not in SERVED:
        raise ValueError(f"model_type={name!r} must be one of {', '.join(SERVED)}")
    known = {**FAMILIES[name].defaults, **{k: v for k, v in config.items() if v is not None}}
    for entry, plain in _PLAIN.items():
        if known.get(entry) not in plain:
            raise ValueError(f"{entry}={known[entry]!r} of the config must be {plain[-1]!r}")
    if name == "gpt2":
        return _gpt2(known)
    return _mamba2(known) if name == "mamba2" else _decoder(name, known)


def _decoder(name: str, known: Config) -> Model:
    if name in ("mistral", "mixtral") and known.get("sliding_window") is not None:
        raise ValueError(f"sliding_window={known['sliding_window']} of the config must be null")
    if name in ("qwen3", "qwen3_moe") and known.get("attention_bias"):
        raise ValueError(f"attention_bias=True must be False: {name} has no biases there")
    heads, hidden = known["num_attention_heads"], known["hidden_size"]
    experts = 0
    if name in MIXTURES:
        experts = known.get("num_local_experts", known.get("num_experts", 0))
    return Model(
        name,
        known,
        layers=known["num_hidden_layers"],
        hidden=hidden,
        vocab=known["vocab_size"],
        heads=heads,
        kv_heads=known.get("num_key_value_heads", heads),
        head=known.get("head_dim", hidden // heads),
        ffn=known.get("moe_intermediate_size" if name == "qwen3_moe" else "intermediate_size", 0),
        experts=experts,
    )


def _gpt2(known: Config) -> Model:
    heads, hidden = known.get("n_head", 12), known["n_embd"]
    if hidden % heads:
        raise ValueError(f"n_head={heads} must divide n_embd={hidden}")
    return Model(
        "gpt2",
        known,
        layers=known["n_layer"],
        hidden=hidden,
        vocab=known["vocab_size"],
        heads=heads,
        kv_heads=heads,
        head=hidden // heads,
        ffn=known.get("n_inner", 4 * hidden),
    )


def _mamba2(known: Config) -> Model:
    words = {"expand": 2, "head_dim": 64, "n_groups": 8, "state_size": 128, "num_heads": 128}
    known = {**words, **known}
    return Model(
        "mamba2",
        known,
        layers=known["num_hidden_layers"],
        hidden=known["hidden_size"],
        vocab=known["vocab_size"],
        heads=known["num_heads"],
        kv_heads=known["n_groups"],
        head=known["head_dim"],
        ffn=known["num_heads"] * known["head_dim"],
    )


def check_fit(model: Model, ranks: Ranks) -> None:
    """Raise unless every rank has whole heads, and as much of everything as the others.

    Raises:
        ValueError: It has not; what does not divide is named.
    """
    faults = []

    def check(count: int, what: str, by: int, name: str) -> None:
        if count % by:
            faults.append(f"{name}={by} must divide {what}, of which there are {count}")

    if ranks.pp > max(1, model.layers):
        faults.append(f"pp={ranks.pp} must be at most the {model.layers} layers")
    check(model.heads, "heads of queries" if model.family != "mamba2" else "heads", ranks.tp, "tp")
    if model.family == "mamba2":
        check(model.kv_heads, "groups of B and C", ranks.tp, "tp")
    elif model.kv_heads % ranks.tp and ranks.tp % model.kv_heads:
        faults.append(
            f"tp={ranks.tp} must divide the {model.kv_heads} heads of keys and values, "
            "or be a multiple of them"
        )
    if model.experts:
        check(model.experts, "experts", ranks.moe_ep, "moe_ep")
        check(model.ffn, "inner features of an expert", ranks.moe_tp or 1, "moe_tp")
    else:
        check(model.ffn, "inner features", ranks.tp, "tp")
        if ranks.moe_ep > 1:
            faults.append(f"moe_ep={ranks.moe_ep} must be 1 for a model without experts")
    if faults:
        raise ValueError("; ".join(faults))
