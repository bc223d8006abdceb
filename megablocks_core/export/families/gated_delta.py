"""Families whose layers are gated delta nets, and attention with gates in some.

Qwen3-Next, and the language models of Qwen3.5, of which some have experts and some have none.

Our models have one mixer a block, called ``model.layers.{}.norm`` and ``model.layers.{}.mixer``; a
layer is two blocks. Inside of a mixer names and shapes are those of Qwen3-Next's files:
``in_proj_qkvz`` holds the queries, keys, values and gates of a key head behind each other,
``in_proj_ba`` the strengths and decays likewise, and ``q_proj`` the query and the gate of a head,
so that an even cut gives every rank whole heads. Qwen3.5 has other tensors on disk: all queries,
then all keys, then all values in one, the gates in another, and strengths and decays apart. Norms
of blocks and heads are stored around zero and stay so: the layer adds one.
"""

from __future__ import annotations

from collections.abc import Callable

from megablocks_core.export.families.in_memory import fused_experts
from megablocks_core.export.families.weights import (
    Config,
    Family,
    Sizes,
    Weight,
    join,
    split,
)

DELTA, ATTENTION, FEED_FORWARD, EXPERTS = "G", "*", "-", "E"
_LETTERS = {"linear_attention": DELTA, "full_attention": ATTENTION}
_LAYER = "model.layers.{}"
_MIXER = f"{_LAYER}.mixer"
# Shapes by names inside of a mixer.
_DELTA_NET = {
    "A_log": "value_heads",
    "dt_bias": "value_heads",
    "conv1d.weight": "channels 1 kernel",
    "norm.weight": "value",
    "out_proj.weight": "hidden values",
}
_PACKED = {"in_proj_qkvz.weight": "qkvz hidden", "in_proj_ba.weight": "ba hidden"}
_ATTENTION = {
    "q_proj.weight": "q_gate hidden",
    "k_proj.weight": "kv hidden",
    "v_proj.weight": "kv hidden",
    "o_proj.weight": "hidden q",
    "q_norm.weight": "head",
    "k_norm.weight": "head",
}
_BIASES = {
    "q_proj.bias": "q_gate",
    "k_proj.bias": "kv",
    "v_proj.bias": "kv",
    "o_proj.bias": "hidden",
}


def _sizes(config: Config) -> Sizes:
    heads, head = config["num_attention_heads"], config["head_dim"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    served = config["linear_num_value_heads"] // config["linear_num_key_heads"]
    return {
        "vocab": config["vocab_size"],
        "hidden": config["hidden_size"],
        "ffn": config["intermediate_size"],
        "head": head,
        "q": heads * head,
        "q_gate": 2 * heads * head,
        "kv": config["num_key_value_heads"] * head,
        "key_heads": config["linear_num_key_heads"],
        "value_heads": config["linear_num_value_heads"],
        "served": served,
        "key": config["linear_key_head_dim"],
        "keys": keys,
        "values_of_key": served * config["linear_value_head_dim"],
        "qkvz": 2 * (keys + values),
        "ba": 2 * config["linear_num_value_heads"],
        "channels": 2 * keys + values,
        "kernel": config["linear_conv_kernel_dim"],
        "value": config["linear_value_head_dim"],
        "values": values,
        "experts": config["num_experts"],
        "expert": config["moe_intermediate_size"],
        "expert_gate_up": 2 * config["moe_intermediate_size"],
        "shared": config["shared_expert_intermediate_size"],
    }


def _kinds(config: Config) -> list[str]:
    count, every = config["num_hidden_layers"], config["full_attention_interval"]
    names = config.get("layer_types")
    if names is None:
        names = [
            "linear_attention" if number % every else "full_attention"
            for number in range(1, count + 1)
        ]
    return [_LETTERS[name] + _second(config, layer) for layer, name in enumerate(names)]


def _second(config: Config, layer: int) -> str:
    step, dense = config["decoder_sparse_step"], config.get("mlp_only_layers", ())
    sparse = config["num_experts"] and (layer + 1) % step == 0 and layer not in dense
    return EXPERTS if sparse else FEED_FORWARD


def _mixer(
    theirs: str, shapes: dict[str, str], *, kind: str, block: int = 0, when: str | None = None
) -> tuple[Weight, ...]:
    return tuple(
        Weight(f"{_LAYER}.{theirs}.{name}", shape, when, f"{_MIXER}.{name}", kind, block)
        for name, shape in shapes.items()
    )


def _mlp(block: str, width: str) -> dict[str, str]:
    sizes = {"gate": f"{width} hidden", "up": f"{width} hidden", "down": f"hidden {width}"}
    return {f"{block}{name}_proj.weight": shape for name, shape in sizes.items()}


def _experts() -> tuple[Weight, ...]:
    """Routed experts, and one of all tokens with a gate."""
    shared = tuple(
        Weight(
            f"{_LAYER}.mlp.{name}",
            shape,
            ours=f"{_MIXER}.{name.replace('shared_expert.', 'shared_experts.')}",
            kind=EXPERTS,
            block=1,
        )
        for name, shape in _mlp("shared_expert.", "shared").items()
    )
    shapes = {"gate.weight": "experts hidden", "shared_expert_gate.weight": "1 hidden"}
    shapes |= _mlp("experts.{}.", "expert")
    return (*_mixer("mlp", shapes, kind=EXPERTS, block=1), *shared)


def _norm(name: str, block: int) -> Weight:
    return Weight(f"{_LAYER}.{name}.weight", "hidden", ours=f"{_LAYER}.norm.weight", block=block)


_ATTENDING = (
    _norm("input_layernorm", 0),
    _norm("post_attention_layernorm", 1),
    *_mixer("self_attn", _ATTENTION, kind=ATTENTION),
    *_experts(),
)
_COMMON = (
    Weight("model.embed_tokens.weight", "vocab hidden"),
    *_ATTENDING,
    *_mixer("self_attn", _BIASES, kind=ATTENTION, when="attention_bias"),
    *_mixer("linear_attn", _DELTA_NET, kind=DELTA),
    *_mixer("mlp", _mlp("", "ffn"), kind=FEED_FORWARD, block=1),
    Weight("model.norm.weight", "hidden"),
    Weight("lm_head.weight", "vocab hidden"),
)
_THEIRS = f"{_LAYER}.linear_attn"
_APART = (
    Weight(
        f"{_THEIRS}.in_proj_qkv.weight",
        "channels hidden",
        others=((f"{_THEIRS}.in_proj_z.weight", "values hidden"),),
        ours=f"{_MIXER}.in_proj_qkvz.weight",
        kind=DELTA,
        steps=(
            join("channels values"),
            split("keys keys values values"),
            join("key key values_of_key values_of_key", groups="key_heads"),
        ),
    ),
    Weight(
        f"{_THEIRS}.in_proj_b.weight",
        "value_heads hidden",
        others=((f"{_THEIRS}.in_proj_a.weight", "value_heads hidden"),),
        ours=f"{_MIXER}.in_proj_ba.weight",
        kind=DELTA,
        steps=(join("served served", groups="key_heads"),),
    ),
)
# Layers that predict later tokens, which published files hold beside the model's.
_PREDICTORS = (
    "mtp.fc.weight",
    "mtp.norm.weight",
    "mtp.pre_fc_norm_embedding.weight",
    "mtp.pre_fc_norm_hidden.weight",
    *(weight.name.replace("model.", "mtp.", 1) for weight in _ATTENDING),
)

_DEFAULTS = {
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "decoder_sparse_step": 1,
    "num_experts": 512,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}


def _all_sparse(config: Config) -> Config:
    """Entries of Qwen3-Next that Qwen3.5 does not read."""
    return {**config, "decoder_sparse_step": 1, "mlp_only_layers": ()}


def _all_dense(config: Config) -> Config:
    return {**config, "num_experts": 0}


def _family(
    architecture: str,
    packed: tuple[Weight, ...],
    defaults: Config,
    in_others_words: Callable[[Config], Config] = _all_sparse,
) -> Family:
    return Family(
        architecture,
        (*_COMMON, *packed),
        _sizes,
        _kinds,
        ("vocab_size", "hidden_size", "num_hidden_layers"),
        {**_DEFAULTS, **defaults},
        ignored=_PREDICTORS,
        blocks=2,
        in_memory=fused_experts(),
        in_others_words=in_others_words,
    )


GATED_DELTA_FAMILIES = {
    "qwen3_next": _family(
        "Qwen3NextForCausalLM", _mixer("linear_attn", _PACKED, kind=DELTA), {}, dict
    ),
    "qwen3_5_text": _family(
        "Qwen3_5ForCausalLM",
        _APART,
        {"intermediate_size": 12288, "num_key_value_heads": 4},
        _all_dense,
    ),
    "qwen3_5_moe_text": _family("Qwen3_5MoeForCausalLM", _APART, {"num_experts": 256}),
}
