"""What each family of Hugging Face configs fixes, and what its entries are called here."""

from typing import Any

# Our names for the entries of a config: sizes it must have, and options it may have.
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
}
OPTIONS = {
    "hidden_act": "activation",
    "rms_norm_eps": "norm_eps",
    "attention_bias": "attention_bias",
    "mlp_bias": "mlp_bias",
    "tie_word_embeddings": "tied",
    "attention_dropout": "attention_dropout",
    "initializer_range": "initializer_range",
    "pad_token_id": "pad_token_id",
}
# Dropouts that configs of these families do not have.
OWN_DROPOUTS = ("hidden_dropout", "activation_dropout")
# What a family fixes and its config has no say in.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"qk_norm": False},
    "mistral": {"qk_norm": False, "attention_bias": False, "mlp_bias": False},
    "qwen2": {"qk_norm": False, "attention_bias": "qkv", "mlp_bias": False},
    "qwen3": {"qk_norm": True, "mlp_bias": False},
    "mixtral": {"qk_norm": False, "attention_bias": False, "mlp_bias": False},
    "qwen2_moe": {"qk_norm": False, "mlp_bias": False},
    "qwen3_moe": {"qk_norm": True, "mlp_bias": False},
    "olmoe": {"qk_norm": "projection", "mlp_bias": False},
    "glm4_moe": {"mlp_bias": False},
}
# Options that configs of one family have.
OWN_OPTIONS: dict[str, dict[str, str]] = {
    "olmoe": {"clip_qkv": "clip_qkv"},
    "glm4_moe": {"use_qk_norm": "qk_norm"},
}
# The entry that says whether all projections but the last have biases, in families without a
# bias of the last.
WITHOUT_LAST_BIAS = {"glm4_moe": "attention_bias", "qwen2_moe": "qkv_bias"}
# The share of a head's features that positions turn, where a config may name another.
TURNED = {"glm4_moe": 0.5}
# How many layers predict later tokens behind the last: a Decoder has none, and none is written.
PREDICTORS = {"glm4_moe": "num_nextn_predict_layers"}
# What an absent entry means, where that is not what it means in Llama's config.
DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32},
    "mixtral": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "qwen2_moe": {"num_key_value_heads": 16, "qkv_bias": True},
    "qwen3_moe": {"num_key_value_heads": 4},
    "olmoe": {"rms_norm_eps": 1e-5},
    "glm4_moe": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "use_qk_norm": False},
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
}
# Families that a Decoder cannot be, and the part that it lacks.
_LATENT = "multi-head latent attention"
MISSING: dict[str, str] = {
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "kimi_k2": _LATENT,
    "gemma": "norms around zero and scaled embeddings",
    "gemma2": "attention in sliding windows and norms behind each layer",
    "gemma3_text": "attention in sliding windows and norms behind each layer",
    "gpt2": "learned positions and layer norms",
    "gpt_oss": "attention with sinks and in sliding windows",
    "llama4": "attention in chunks",
    "llama4_text": "attention in chunks",
}
