"""Families whose experts are DeepSeek-V3's: it and DeepSeek-V2, Kimi K2, and GLM-4.5.

The first have latent attention (https://arxiv.org/abs/2405.04434, section 2.1), GLM-4.5 attention
as Llama has it. Experts have one tensor each, and the first layers have none.

Published folders of DeepSeek-V3 and GLM-4.5 hold a layer behind the last, which predicts a later
token. Models of transformers have no such layer: they leave its tensors out when they load, and
write none. So it is here: the names of that layer, and no others, are not read.
"""

from __future__ import annotations

from megablocks_core.export.families.dense import (
    DENSE,
    FRAME,
    NEEDED,
    QK_NORMS,
    SPARSE,
    attention_biases,
    dense_sizes,
    experts,
    mlp,
    mlp_shapes,
)
from megablocks_core.export.families.in_memory import fused_experts
from megablocks_core.export.families.weights import Config, Family, Sizes, Weight

_ATTENTION = "model.layers.{}.self_attn"
# Sizes that have no default where no class of transformers gives one.
_KIMI_NEEDED = (
    *NEEDED,
    "moe_intermediate_size",
    "n_routed_experts",
    "n_shared_experts",
    "first_k_dense_replace",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)


def _sizes(config: Config) -> Sizes:
    experts = {"num_local_experts": config["n_routed_experts"]}
    sizes = dense_sizes({**config, **experts})
    return {**sizes, "shared": config.get("n_shared_experts", 0) * sizes["expert"]}


def _latent_sizes(config: Config) -> Sizes:
    heads, turned = config["num_attention_heads"], config["qk_rope_head_dim"]
    plain, value, rank = config["qk_nope_head_dim"], config["v_head_dim"], config["kv_lora_rank"]
    return {
        **_sizes(config),
        "q": heads * (plain + turned),
        "q_rank": config.get("q_lora_rank", 0),
        "kv_rank": rank,
        "kv_turned": rank + turned,
        "kv": heads * (plain + value),
        "values": heads * value,
    }


def _kinds(config: Config) -> list[str]:
    dense = config["first_k_dense_replace"]
    return [DENSE if layer < dense else SPARSE for layer in range(config["num_hidden_layers"])]


def _latent(name: str, shape: str, when: str | None = None) -> Weight:
    return Weight(f"{_ATTENTION}.{name}", shape, when)


_LATENT = (
    _latent("q_proj.weight", "q hidden", "not q_lora_rank"),
    _latent("q_a_proj.weight", "q_rank hidden", "q_lora_rank"),
    _latent("q_a_layernorm.weight", "q_rank", "q_lora_rank"),
    _latent("q_b_proj.weight", "q q_rank", "q_lora_rank"),
    _latent("kv_a_proj_with_mqa.weight", "kv_turned hidden"),
    _latent("kv_a_layernorm.weight", "kv_rank"),
    _latent("kv_b_proj.weight", "kv kv_rank"),
    _latent("o_proj.weight", "hidden values"),
    _latent("q_a_proj.bias", "q_rank", "attention_bias and q_lora_rank"),
    _latent("kv_a_proj_with_mqa.bias", "kv_turned", "attention_bias"),
    _latent("o_proj.bias", "hidden", "attention_bias"),
)
_LATENT_FRAME = (*(weight for weight in FRAME if ".self_attn." not in weight.name), *_LATENT)
_FEED_FORWARD = (
    *mlp(DENSE),
    *experts(),
    *(
        Weight(
            f"model.layers.{{}}.mlp.shared_experts.{name}_proj.weight",
            shape,
            "n_shared_experts",
            kind=SPARSE,
        )
        for name, shape in mlp_shapes("shared").items()
    ),
)
_SELECTION_BIAS = Weight("model.layers.{}.mlp.gate.e_score_correction_bias", "experts", kind=SPARSE)
_BIASES = tuple(
    Weight(f"model.layers.{{}}.mlp.{block}{name}_proj.bias", size, when, kind=kind)
    for block, width, when, kind in (
        ("", "ffn", "mlp_bias", DENSE),
        ("shared_experts.", "shared", "mlp_bias and n_shared_experts", SPARSE),
    )
    for name, size in (("gate", width), ("up", width), ("down", "hidden"))
)
_V3 = (*_LATENT_FRAME, *_FEED_FORWARD, _SELECTION_BIAS)
_GLM = (
    *FRAME,
    *attention_biases("attention_bias", *"qkv"),
    *(Weight(norm.name, norm.shape, "use_qk_norm") for norm in QK_NORMS),
    *_FEED_FORWARD,
    _SELECTION_BIAS,
)
_OF_PREDICTORS = (
    "enorm.weight",
    "hnorm.weight",
    "eh_proj.weight",
    "embed_tokens.weight",
    "shared_head.norm.weight",
    "shared_head.head.weight",
)


def _predictors(weights: tuple[Weight, ...]) -> tuple[str, ...]:
    """A layer with experts, and what leads into it and out of it."""
    layer = "model.layers.{}."
    held = [w.name for w in weights if w.name.startswith(layer) and w.kind in (None, SPARSE)]
    return (*held, *(layer + name for name in _OF_PREDICTORS))


_LATENT_DEFAULTS = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_TABLES = ("model.layers.{}.self_attn.rotary_emb.inv_freq",)

DEEPSEEK_FAMILIES = {
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        (*_LATENT_FRAME, *_FEED_FORWARD, *_BIASES),
        _latent_sizes,
        _kinds,
        NEEDED,
        {
            **_LATENT_DEFAULTS,
            "moe_intermediate_size": 1407,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
        },
        ignored=_TABLES,
        in_memory=fused_experts(),
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        _V3,
        _latent_sizes,
        _kinds,
        NEEDED,
        {
            **_LATENT_DEFAULTS,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
            "num_nextn_predict_layers": 1,
        },
        ignored=_TABLES,
        in_memory=fused_experts(),
        predictors=_predictors(_V3),
    ),
    "kimi_k2": Family(
        "DeepseekV3ForCausalLM",
        _V3,
        _latent_sizes,
        _kinds,
        _KIMI_NEEDED,
        ignored=_TABLES,
        in_memory=fused_experts(),
        predictors=_predictors(_V3),
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        _GLM,
        _sizes,
        _kinds,
        NEEDED,
        {
            "num_key_value_heads": 8,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 1,
        },
        ignored=_TABLES,
        in_memory=fused_experts(),
        predictors=_predictors(_GLM),
    ),
}
