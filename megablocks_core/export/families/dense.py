"""Families whose every layer is attention and a feed-forward layer, or experts."""

from __future__ import annotations

from collections.abc import Mapping

from megablocks_core.export.families.in_memory import PROJECTIONS, fused_experts
from megablocks_core.export.families.weights import Config, Family, Sizes, Weight

# Kinds of feed-forward layers.
DENSE, SPARSE = "-", "E"
NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


def dense_sizes(config: Config) -> Sizes:
    """The sizes of attention, feed-forward layers and experts."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head = config.get("head_dim", hidden // heads)
    expert = config.get("moe_intermediate_size", config["intermediate_size"])
    return {
        "vocab": config["vocab_size"],
        "hidden": hidden,
        "ffn": config["intermediate_size"],
        "heads": heads,
        "head": head,
        "q": heads * head,
        "kv": config.get("num_key_value_heads", heads) * head,
        "experts": _num_experts(config),
        "expert": expert,
        "expert_gate_up": 2 * expert,
        "shared": config.get("shared_expert_intermediate_size", 0),
    }


def _num_experts(config: Config) -> int:
    """Configs have one of two names; transformers 5 takes either for the other."""
    return config.get("num_local_experts", config.get("num_experts", 0))


def _kinds(config: Config) -> list[str]:
    """Which layers have experts, in a family that has some."""
    every, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers", ())
    some = _num_experts(config)
    return [
        SPARSE if some and (layer + 1) % every == 0 and layer not in dense else DENSE
        for layer in range(config["num_hidden_layers"])
    ]


def dense_family(
    architecture: str,
    weights: tuple[Weight, ...],
    defaults: Config | None = None,
    in_memory: tuple[Weight, ...] = (),
) -> Family:
    """A family whose config has Llama's words."""
    return Family(
        architecture,
        weights,
        sizes=dense_sizes,
        kinds=_kinds,
        needed=NEEDED,
        defaults=defaults or {},
        ignored=("model.layers.{}.self_attn.rotary_emb.inv_freq",),
        in_memory=in_memory,
    )


FRAME = (
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


def mlp_shapes(width: str) -> dict[str, str]:
    """Shapes of a feed-forward layer with a gate."""
    return {"gate": f"{width} hidden", "up": f"{width} hidden", "down": f"hidden {width}"}


def mlp(kind: str | None = None) -> tuple[Weight, ...]:
    """A feed-forward layer."""
    return tuple(
        Weight(f"model.layers.{{}}.mlp.{name}_proj.weight", shape, kind=kind)
        for name, shape in mlp_shapes("ffn").items()
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
        for name, shape in mlp_shapes("shared").items()
    )
    return (*parts, Weight(f"{block}.shared_expert_gate.weight", "1 hidden", kind=SPARSE))


def experts(block: str = "mlp", names: Mapping[str, str] = PROJECTIONS) -> tuple[Weight, ...]:
    """A router and experts whose parts have these on-disk names."""
    ours = "model.layers.{}.mlp"
    theirs = f"model.layers.{{}}.{block}"
    shapes = mlp_shapes("expert")
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


TRUNK = (*FRAME, *mlp())
_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}
QK_NORMS = (
    Weight("model.layers.{}.self_attn.q_norm.weight", "head"),
    Weight("model.layers.{}.self_attn.k_norm.weight", "head"),
)


def attention_biases(when: str | None, *names: str) -> tuple[Weight, ...]:
    """Biases of these projections, if the config has the entry ``when``."""
    sizes = {"q": "q", "k": "kv", "v": "kv", "o": "hidden"}
    return tuple(
        Weight(f"model.layers.{{}}.self_attn.{name}_proj.bias", sizes[name], when) for name in names
    )


_MLP_BIASES = tuple(
    Weight(f"model.layers.{{}}.mlp.{name}_proj.bias", size, "mlp_bias")
    for name, size in (("gate", "ffn"), ("up", "ffn"), ("down", "hidden"))
)

DENSE_FAMILIES = {
    "llama": dense_family(
        "LlamaForCausalLM", (*TRUNK, *attention_biases("attention_bias", *"qkvo"), *_MLP_BIASES)
    ),
    "mistral": dense_family("MistralForCausalLM", TRUNK, {"num_key_value_heads": 8}),
    "qwen2": dense_family(
        "Qwen2ForCausalLM", (*TRUNK, *attention_biases(None, *"qkv")), {"num_key_value_heads": 32}
    ),
    "qwen3": dense_family(
        "Qwen3ForCausalLM",
        (*TRUNK, *QK_NORMS, *attention_biases("attention_bias", *"qkvo")),
        {"num_key_value_heads": 32, "head_dim": 128},
    ),
    "mixtral": dense_family(
        "MixtralForCausalLM",
        (*FRAME, *experts("block_sparse_moe", _MIXTRAL)),
        {"num_key_value_heads": 8, "num_experts": 8},
        fused_experts(on_disk="model.layers.{}.block_sparse_moe", names=_MIXTRAL),
    ),
    "qwen2_moe": dense_family(
        "Qwen2MoeForCausalLM",
        (
            *FRAME,
            *attention_biases("qkv_bias", *"qkv"),
            *mlp(kind=DENSE),
            *experts(),
            *_shared_expert(),
        ),
        {
            "num_key_value_heads": 16,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts": 60,
            "qkv_bias": True,
        },
        fused_experts(),
    ),
    "qwen3_moe": dense_family(
        "Qwen3MoeForCausalLM",
        (
            *FRAME,
            *QK_NORMS,
            *attention_biases("attention_bias", *"qkvo"),
            *mlp(kind=DENSE),
            *experts(),
        ),
        {"num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128},
        fused_experts(),
    ),
    "olmoe": dense_family(
        "OlmoeForCausalLM",
        (
            *FRAME,
            Weight("model.layers.{}.self_attn.q_norm.weight", "q"),
            Weight("model.layers.{}.self_attn.k_norm.weight", "kv"),
            *attention_biases("attention_bias", *"qkvo"),
            *experts(),
        ),
        {"num_experts": 64},
        fused_experts(),
    ),
}
