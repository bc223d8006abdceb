"""Configs of models whose blocks are all of Mamba, or all of Mamba-2."""

from __future__ import annotations

import math
from dataclasses import replace

from megablocks_core.layers.spec.block_lists import read_count, write_count
from megablocks_core.layers.spec.entries import Entries
from megablocks_core.layers.spec.hybrid_family import COMMON, HybridFamily, check_expand
from megablocks_core.layers.spec.mixer_specs import Mamba1Spec, Mamba2Spec
from megablocks_core.layers.spec.state_spaces import MAMBA1, MAMBA2


def _derive_mamba(entries: Entries) -> None:
    hidden = entries.peek("hidden_size") or 0
    entries.default("intermediate_size", int(entries.take("expand", 2) * hidden))
    if entries.peek("time_step_rank") in (None, "auto"):
        entries.take("time_step_rank")
        entries.default("time_step_rank", math.ceil(hidden / 16))


def _derive_mamba2(entries: Entries) -> None:
    entries.take("time_step_rank")
    entries.take("intermediate_size")
    check_expand(entries, "expand", "num_heads", "head_dim")


_DEFAULTS = {
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.1,
    "residual_in_fp32": True,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "expand": 2,
}

_MAMBA = HybridFamily(
    "MambaForCausalLM",
    Mamba1Spec,
    read_count,
    write_count,
    {
        "": {
            **COMMON,
            "layer_norm_epsilon": "norm_eps",
            "residual_in_fp32": "float32_residual",
            "intermediate_size": "mamba.inner_size",
            "state_size": "mamba.state_size",
            "time_step_rank": "mamba.dt_rank",
            "conv_kernel": "mamba.conv_kernel",
            "use_bias": "mamba.bias",
            "use_conv_bias": "mamba.conv_bias",
        }
    },
    {**_DEFAULTS, "state_size": 16, "tie_word_embeddings": True},
    required={"hidden_act": "silu"},
    derive=_derive_mamba,
)
_MAMBA2 = HybridFamily(
    "Mamba2ForCausalLM",
    Mamba2Spec,
    read_count,
    write_count,
    {
        "": {
            **COMMON,
            "layer_norm_epsilon": "norm_eps",
            "residual_in_fp32": "float32_residual",
            "num_heads": "mamba.num_heads",
            "head_dim": "mamba.head_dim",
            "state_size": "mamba.state_size",
            "n_groups": "mamba.num_groups",
            "conv_kernel": "mamba.conv_kernel",
            "chunk_size": "mamba.chunk_size",
            "use_bias": "mamba.bias",
            "use_conv_bias": "mamba.conv_bias",
            "time_step_limit": "mamba.time_step_limit",
        }
    },
    {
        **_DEFAULTS,
        "num_heads": 128,
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 8,
        "chunk_size": 256,
        "time_step_limit": (0.0, math.inf),
        "tie_word_embeddings": False,
    },
    required={"hidden_act": "silu"},
    derive=_derive_mamba2,
)

MAMBA_FAMILIES = {
    "mamba": _MAMBA,
    "mamba2": _MAMBA2,
    # The same models with the configs of their authors.
    MAMBA1: replace(_MAMBA, architecture="MambaLMHeadModel"),
    MAMBA2: replace(_MAMBA2, architecture="MambaLMHeadModel"),
}
