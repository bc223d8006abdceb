"""Small configs of models with state-space blocks, of which entries matter."""

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

SIZES: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "initializer_range": 0.05}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 2, "num_hidden_layers": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "mamba": {"num_hidden_layers": 3, "state_size": 4, "expand": 3, "time_step_rank": 5},
    "mamba2": {
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 2,
        "time_step_limit": [0.01, 0.5],
        "tie_word_embeddings": True,
    },
    "nemotron_h": {
        **HEADS,
        "layers_block_type": ["mamba", "attention", "mlp", "moe"],
        "intermediate_size": 40,
        "head_dim": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_routed_experts": 8,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 16,
        "n_group": 2,
        "routed_scaling_factor": 2.5,
    },
    "bamba": {
        **HEADS,
        **MAMBA2,
        "intermediate_size": 40,
        "attn_layer_indices": [1],
        "attention_bias": True,
    },
    "granitemoehybrid": {
        **HEADS,
        **MAMBA2,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 40,
        "position_embedding_type": "rope",
        "embedding_multiplier": 12,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.015625,
        "logits_scaling": 6,
    },
}


def config_of(family: str, **changes: Any) -> PreTrainedConfig:
    """That of a family, with other entries."""
    return AutoConfig.for_model(family, **{**SIZES, **CONFIGS[family], **changes})
