"""Configs of the state-spaces models (https://github.com/state-spaces/mamba), in others' words.

They have no ``model_type`` and keep what a block is in an entry ``ssm_cfg``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAMBA1, MAMBA2 = "mamba_ssm", "mamba2_ssm"
# Entries of ``ssm_cfg`` in the words of transformers' configs, and what an absent one means.
_BLOCKS: dict[str, dict[str, tuple[str, Any]]] = {
    MAMBA1: {
        "d_state": ("state_size", 16),
        "d_conv": ("conv_kernel", 4),
        "expand": ("expand", 2),
        "dt_rank": ("time_step_rank", "auto"),
        "bias": ("use_bias", False),
        "conv_bias": ("use_conv_bias", True),
    },
    MAMBA2: {
        "d_state": ("state_size", 128),
        "d_conv": ("conv_kernel", 4),
        "expand": ("expand", 2),
        "headdim": ("head_dim", 64),
        "ngroups": ("n_groups", 1),
        "chunk_size": ("chunk_size", 256),
        "bias": ("use_bias", False),
        "conv_bias": ("use_conv_bias", True),
        "dt_limit": ("time_step_limit", (0.0, float("inf"))),
    },
}
_LAYERS = {"Mamba1": MAMBA1, "Mamba2": MAMBA2}
_MODEL = {"d_model": "hidden_size", "n_layer": "num_hidden_layers"}
# Entries that must be these, or absent, and such that do not change the function.
_REQUIRED = {"d_intermediate": 0, "attn_layer_idx": [], "rms_norm": True}
_INERT = ("attn_cfg", "dtype", "fused_add_norm", "pad_vocab_size_multiple", "torch_dtype")


def is_state_spaces(config: Mapping[str, Any]) -> bool:
    """Whether a config is of these models."""
    return "model_type" not in config and "d_model" in config


def read_state_spaces(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config in the words of transformers, with a ``model_type``.

    Raises:
        ValueError: It asks for what a ``Decoder`` does not have.
    """
    left = dict(config)
    if missing := [name for name in ("vocab_size", *_MODEL) if name not in left]:
        raise ValueError(f"config must have {missing}")
    for name, value in _REQUIRED.items():
        if (found := left.pop(name, value)) != value:
            raise ValueError(f"{name}={found!r} must be {value!r}")
    blocks = dict(left.pop("ssm_cfg", {}))
    layer = blocks.pop("layer", "Mamba1")
    if layer not in _LAYERS:
        raise ValueError(f"ssm_cfg's layer={layer!r} must be one of {', '.join(_LAYERS)}")
    family = _LAYERS[layer]
    step = left.get("pad_vocab_size_multiple", 8)
    words = {
        "model_type": family,
        "vocab_size": -(-left.pop("vocab_size") // step) * step,
        "residual_in_fp32": left.pop("residual_in_fp32", True),
        "tie_word_embeddings": left.pop("tie_embeddings", True),
        **{new: left.pop(old) for old, new in _MODEL.items()},
        **{new: blocks.pop(old, usual) for old, (new, usual) in _BLOCKS[family].items()},
    }
    if family == MAMBA2:
        words["num_heads"] = words["expand"] * words["hidden_size"] // words["head_dim"]
    for name in _INERT:
        left.pop(name, None)
    if left or blocks:
        raise ValueError(f"config asks for what a Decoder does not have: {left | blocks}")
    return words


def write_state_spaces(words: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of ``read_state_spaces``."""
    family = words["model_type"]
    layer = next(name for name, own in _LAYERS.items() if own == family)
    blocks = {old: words[new] for old, (new, _) in _BLOCKS[family].items()}
    return {
        **{old: words[new] for old, new in _MODEL.items()},
        "vocab_size": words["vocab_size"],
        "ssm_cfg": {"layer": layer, **blocks},
        "rms_norm": True,
        "residual_in_fp32": words["residual_in_fp32"],
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 1,
        "tie_embeddings": words["tie_word_embeddings"],
    }
