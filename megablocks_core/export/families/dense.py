"""Families whose every layer is attention and a feed-forward layer, or experts."""

from __future__ import annotations

from megablocks_core.export.families.weights import Config, Family, Sizes, Weight

# Kinds of feed-forward layers.
DENSE, SPARSE = "-", "E"
_NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


def _sizes(config: Config) -> Sizes:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head = config.get("head_dim", hidden // heads)
    return {
        "vocab": config["vocab_size"],
        "hidden": hidden,
        "ffn": config["intermediate_size"],
        "head": head,
        "q": heads * head,
        "kv": config.get("num_key_value_heads", heads) * head,
        "experts": _num_experts(config),
        "expert": config.get("moe_intermediate_size", config["intermediate_size"]),
        "shared": config.get("shared_expert_intermediate_size", 0),
    }


def _num_experts(config: Config) -> int:
    """Configs have one of two names; transformers 5 takes either for the other."""
    return config.get("num_local_experts", config.get("num_experts", 0))


def _kinds(config: Config) -> list[str]:
    """Which layers have experts, in a family that has some."""
    every, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers", ())
    return [
        SPARSE if (layer + 1) % every == 0 and layer not in dense else DENSE
        for layer in range(config["num_hidden_layers"])
    ]


def _family(
    architecture: str, weights: tuple[Weight, ...], defaults: Config | None = None
) -> Family:
    return Family(
        architecture,
        weights,
        sizes=_sizes,
        kinds=_kinds,
        needed=_NEEDED,
        defaults=defaults or {},
        ignored=("model.layers.{}.self_attn.rotary_emb.inv_freq",),
    )


_FRAME = (
    Weight("model.embed_tokens.weight", "vocab hidden"),
    Weight("model.layers.{}.input_layernorm.weight", "hidden"),
    Weight("model.layers.{}.self_attn.q_proj.weight", "q hidden"),
    Weight("model.layers.{}.self_attn.k_proj.weight", "kv hidden"),
    Weight("model.layers.{}.self_attn.v_proj.weight", "kv hidden"),
    Weight("model.layers.{}.self_attn.o_proj.weight", "hidden q"),
    Weight("model.layers.{}.post_attention_layernorm.weight", "hidden"),
    Weight("model.norm.weight", "hidden"),
    Weight("lm_head.weight", "vocab hidden"),
)


def _mlp_shapes(width: str) -> dict[str, str]:
    return {"gate": f"{width} hidden", "up": f"{width} hidden", "down": f"hidden {width}"}


def _mlp(kind: str | None = None) -> tuple[Weight, ...]:
    return tuple(
        Weight(f"model.layers.{{}}.mlp.{name}_proj.weight", shape, kind=kind)
        for name, shape in _mlp_shapes("ffn").items()
    )


def _shared_expert() -> tuple[Weight, ...]:
    """An expert of all tokens, with a gate."""
    block = "model.layers.{}.mlp"
    parts = tuple(
        Weight(
            f"{block}.shared_expert.{name}_proj.weight",
            shape,
            ours=f"{block}.shared_experts.{name}_proj.weight",
            kind=SPARSE,
        )
        for name, shape in _mlp_shapes("shared").items()
    )
    return (*parts, Weight(f"{block}.shared_expert_gate.weight", "1 hidden", kind=SPARSE))


def _experts(block: str, **names: str) -> tuple[Weight, ...]:
    """A router and experts whose parts have these on-disk names."""
    ours = "model.layers.{}.mlp"
    theirs = f"model.layers.{{}}.{block}"
    shapes = _mlp_shapes("expert")
    pairs = [("gate.weight", "gate.weight", "experts hidden")]
    pairs += [
        (f"experts.{{}}.{name}.weight", f"experts.{{}}.{part}_proj.weight", shapes[part])
        for part, name in names.items()
    ]
    return tuple(
        Weight(
            f"{theirs}.{name}",
            shape,
            ours=f"{ours}.{own}" if (theirs, name) != (ours, own) else None,
            kind=SPARSE,
        )
        for name, own, shape in pairs
    )


_TRUNK = (*_FRAME, *_mlp())
_PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_QK_NORMS = (
    Weight("model.layers.{}.self_attn.q_norm.weight", "head"),
    Weight("model.layers.{}.self_attn.k_norm.weight", "head"),
)


def _attention_biases(when: str | None, *names: str) -> tuple[Weight, ...]:
    sizes = {"q": "q", "k": "kv", "v": "kv", "o": "hidden"}
    return tuple(
        Weight(f"model.layers.{{}}.self_attn.{name}_proj.bias", sizes[name], when) for name in names
    )


_MLP_BIASES = tuple(
    Weight(f"model.layers.{{}}.mlp.{name}_proj.bias", size, "mlp_bias")
    for name, size in (("gate", "ffn"), ("up", "ffn"), ("down", "hidden"))
)

DENSE_FAMILIES = {
    "llama": _family(
        "LlamaForCausalLM", (*_TRUNK, *_attention_biases("attention_bias", *"qkvo"), *_MLP_BIASES)
    ),
    "mistral": _family("MistralForCausalLM", _TRUNK, {"num_key_value_heads": 8}),
    "qwen2": _family(
        "Qwen2ForCausalLM", (*_TRUNK, *_attention_biases(None, *"qkv")), {"num_key_value_heads": 32}
    ),
    "qwen3": _family(
        "Qwen3ForCausalLM",
        (*_TRUNK, *_QK_NORMS, *_attention_biases("attention_bias", *"qkvo")),
        {"num_key_value_heads": 32, "head_dim": 128},
    ),
    "mixtral": _family(
        "MixtralForCausalLM",
        (*_FRAME, *_experts("block_sparse_moe", gate="w1", up="w3", down="w2")),
        {"num_key_value_heads": 8, "num_experts": 8},
    ),
    "qwen2_moe": _family(
        "Qwen2MoeForCausalLM",
        (
            *_FRAME,
            *_attention_biases(None, *"qkv"),
            *_mlp(kind=DENSE),
            *_experts("mlp", **_PROJECTIONS),
            *_shared_expert(),
        ),
        {
            "num_key_value_heads": 16,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts": 60,
        },
    ),
    "qwen3_moe": _family(
        "Qwen3MoeForCausalLM",
        (
            *_FRAME,
            *_QK_NORMS,
            *_attention_biases("attention_bias", *"qkvo"),
            *_mlp(kind=DENSE),
            *_experts("mlp", **_PROJECTIONS),
        ),
        {"num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128},
    ),
    "olmoe": _family(
        "OlmoeForCausalLM",
        (
            *_FRAME,
            Weight("model.layers.{}.self_attn.q_norm.weight", "q"),
            Weight("model.layers.{}.self_attn.k_norm.weight", "kv"),
            *_attention_biases("attention_bias", *"qkvo"),
            *_experts("mlp", **_PROJECTIONS),
        ),
        {"num_experts": 64},
    ),
}
