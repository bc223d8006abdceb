"""Tiny models of every family that a Decoder serves: transformers' files, logits and gradients."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode

TOKENS = torch.arange(28).view(4, 7) * 5 % 50
F64 = torch.float64
# A vocabulary that neither two nor four ranks cut evenly.
_SIZES: dict[str, Any] = {"vocab_size": 51, "hidden_size": 32, "eos_token_id": 2}
_HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
_DENSE = {**_HEADS, "num_hidden_layers": 2, "intermediate_size": 40}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e3,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_MAMBA2 = {
    "num_hidden_layers": 2,
    "mamba_n_heads": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 4,
}
_TIED = {"tie_word_embeddings": True}
_EIGHT_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
_DELTA: dict[str, Any] = {
    **_DENSE,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
}
# Case: family, and what transformers' config has beside the sizes.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**_DENSE, "rope_parameters": _LLAMA3}),
    "llama-biases": ("llama", {**_DENSE, **_TIED, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {**_DENSE, "head_dim": 16, "sliding_window": None}),
    "qwen2": ("qwen2", _DENSE),
    "qwen3": ("qwen3", {**_DENSE, **_TIED, "head_dim": 16}),
    "mixtral": ("mixtral", {**_DENSE, "num_local_experts": 4, "head_dim": 8}),
    "qwen2_moe": (
        "qwen2_moe",
        {
            **_DENSE,
            **_EIGHT_EXPERTS,
            "shared_expert_intermediate_size": 24,
            "decoder_sparse_step": 2,
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {
            **_DENSE,
            **_EIGHT_EXPERTS,
            **_TIED,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
            "head_dim": 16,
        },
    ),
    "olmoe": ("olmoe", {**_DENSE, "num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 1.5}),
    "glm4_moe": (
        "glm4_moe",
        {
            **_DENSE,
            "head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "mamba": ("mamba", {"num_hidden_layers": 2, "state_size": 4}),
    "mamba2": (
        "mamba2",
        {"num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "n_groups": 4}
        | {"state_size": 8, "chunk_size": 4},
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            **_HEADS,
            "layers_block_type": ["mamba", "attention", "mlp", "moe"],
            "intermediate_size": 40,
            "head_dim": 8,
            "mamba_num_heads": 8,
            "mamba_head_dim": 4,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 4,
            "n_routed_experts": 8,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 16,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 2.5,
        },
    ),
    "bamba": (
        "bamba",
        {**_HEADS, **_MAMBA2, **_TIED, "intermediate_size": 40, "attn_layer_indices": [1]},
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **_HEADS,
            **_MAMBA2,
            "layer_types": ["mamba", "attention"],
            "intermediate_size": 24,
            "shared_intermediate_size": 40,
            "num_local_experts": 4,
            "position_embedding_type": "rope",
            "embedding_multiplier": 12,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.25,
            "logits_scaling": 6,
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            **_DELTA,
            **_EIGHT_EXPERTS,
            "attention_bias": True,
            "mlp_only_layers": [1],
            "shared_expert_intermediate_size": 24,
        },
    ),
    "qwen3_5_text": ("qwen3_5_text", {**_DELTA, **_TIED}),
    "qwen3_5_moe_text": (
        "qwen3_5_moe_text",
        {**_DELTA, **_EIGHT_EXPERTS, "shared_expert_intermediate_size": 24},
    ),
    "state-spaces-mamba": ("mamba_ssm", {"num_hidden_layers": 2, "state_size": 16}),
    "state-spaces-mamba2": (
        "mamba2_ssm",
        {"num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "n_groups": 2}
        | {"state_size": 16, "chunk_size": 256},
    ),
}
# Families that are published in their authors' words, which transformers has under other names.
_PUBLISHED: dict[str, dict[str, Any]] = {
    "mamba_ssm": {"ssm_cfg": {}, "pad_vocab_size_multiple": 3},
    "mamba2_ssm": {
        "ssm_cfg": {"layer": "Mamba2", "d_state": 16, "headdim": 8, "ngroups": 2},
        "tie_embeddings": False,
        "pad_vocab_size_multiple": 1,
    },
}
EXPERTS = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "glm4_moe",
    "nemotron_h",
    "granitemoehybrid",
    "qwen3_next",
    "qwen3_5_moe_text",
)


def write_reference(case: str, folder: Path) -> None:
    """Write ``weights`` and ``gradients``, both in the files' own layout, and the logits."""
    model = tiny(case)
    with InFloat64():
        logits = model(TOKENS, use_cache=False).logits
    (logits * cotangent()).sum().backward()
    save_file({"logits": logits.detach().contiguous()}, folder / "logits.safetensors")
    _save(case, model, folder / "weights")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            parameter.copy_(parameter.grad)
    _save(case, model, folder / "gradients")


def tiny(case: str, dtype: torch.dtype = F64) -> Any:
    """A transformers model far from its initial values, where all is linear."""
    family, options = MODELS[case]
    torch.manual_seed(1)
    model_type = family.removesuffix("_ssm")
    config = transformers.AutoConfig.for_model(model_type, **{**_SIZES, **options})
    with InFloat64():  # Rotary tables are made here.
        model = transformers.AutoModelForCausalLM.from_config(
            config, experts_implementation="eager"
        )
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[2] not in ("A_log", "D", "dt_bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    model.to(dtype)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # float32 in every published checkpoint
            buffer.data = torch.nn.init.normal_(buffer, std=0.1).float()
    return model


class InFloat64(TorchFunctionMode):
    """Computes in float64 what transformers rounds to float32 inside."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Ask for float64 where float32 was asked for."""
        if func is torch.Tensor.float:
            return args[0].double()
        words = {name: _widened(value) for name, value in (kwargs or {}).items()}
        return func(*(_widened(value) for value in args), **words)


def _widened(value: Any) -> Any:
    return F64 if value is torch.float32 else value


def cotangent() -> torch.Tensor:
    """What logits are multiplied with, and then summed up."""
    return torch.randn(4, 7, 51, dtype=F64, generator=torch.Generator().manual_seed(4))


def _save(case: str, model: Any, folder: Path) -> None:
    words = _PUBLISHED.get(MODELS[case][0])
    if words is None:
        model.save_pretrained(folder)
        return
    folder.mkdir()
    tensors = {
        name.replace("backbone.embeddings", "backbone.embedding"): tensor
        for name, tensor in model.state_dict().items()
    }
    torch.save(tensors, folder / "pytorch_model.bin")
    sizes = {"d_model": 32, "n_layer": 2, "vocab_size": 51, "rms_norm": True}
    (folder / "config.json").write_text(json.dumps({**sizes, **words}))
