"""The table says exactly what transformers writes, for every option of every hybrid family."""

from typing import Any

import pytest
import torch
import transformers

from megablocks_core.export.families import FAMILIES
from megablocks_core.export.families.hybrid import HYBRID_FAMILIES
from tests.export.family_checks import (
    check_decoder,
    check_files,
    check_whole_model,
    num_parameters,
    saved_by_transformers,
)

SIZES: dict[str, Any] = {"vocab_size": 11, "hidden_size": 16}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
BAMBA = {**HEADS, "num_hidden_layers": 2, "mamba_n_heads": 4, "mamba_d_state": 6}
NEMOTRON: dict[str, Any] = {
    **HEADS,
    "layers_block_type": ["mamba", "attention", "mlp", "moe"],
    "intermediate_size": 20,
    "head_dim": 6,
    "mamba_num_heads": 4,
    "mamba_head_dim": 6,
    "ssm_state_size": 5,
    "n_groups": 2,
    "n_routed_experts": 3,
    "moe_intermediate_size": 12,
    "moe_shared_expert_intermediate_size": 14,
    "mlp_bias": False,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("mamba", {"num_hidden_layers": 2, "state_size": 3, "expand": 3}),
    ("mamba", {"num_hidden_layers": 1, "use_bias": True, "use_conv_bias": False}),
    ("mamba", {"num_hidden_layers": 1, "tie_word_embeddings": False, "time_step_rank": 5}),
    ("mamba2", {"num_hidden_layers": 2, "num_heads": 8, "head_dim": 4, "n_groups": 2}),
    ("mamba2", {"num_hidden_layers": 1, "num_heads": 8, "head_dim": 4, "use_bias": True}),
    ("nemotron_h", NEMOTRON),
    (
        "nemotron_h",
        {
            "layers_block_type": ["mlp", "mamba"],
            "intermediate_size": 20,
            "mlp_bias": True,
            "use_bias": True,
            "n_groups": 2,
            "mamba_num_heads": 4,
            "mamba_head_dim": 6,
        },
    ),
    (
        "nemotron_h",
        {
            **HEADS,
            "layers_block_type": ["mamba", "moe", "mlp"],
            "n_groups": 2,
            "intermediate_size": 20,
            "mamba_num_heads": 4,
            "mamba_head_dim": 6,
            "n_routed_experts": 3,
            "moe_intermediate_size": 12,
            "moe_shared_expert_intermediate_size": 14,
            "moe_latent_size": 8,
            "mlp_bias": True,
        },
    ),
    ("bamba", {**BAMBA, "intermediate_size": 20, "attn_layer_indices": [1]}),
    ("bamba", {**BAMBA, "intermediate_size": 20, "num_key_value_heads": None, "mamba_d_head": 8}),
    (
        "bamba",
        {
            **BAMBA,
            "intermediate_size": 20,
            "attn_layer_indices": [0],
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    (
        "granitemoehybrid",
        {
            **BAMBA,
            "layer_types": ["mamba", "attention"],
            "intermediate_size": 20,
            "shared_intermediate_size": 24,
            "num_local_experts": 3,
        },
    ),
    (
        "granitemoehybrid",
        {
            **BAMBA,
            "layer_types": ["attention", "mamba"],
            "shared_intermediate_size": 24,
            "num_local_experts": 0,
            "attention_bias": True,
        },
    ),
]
# What a config must have, and inner widths that fit the heads of the defaults.
ALMOST_EMPTY: dict[str, dict[str, Any]] = {
    "mamba": {"num_hidden_layers": 1},
    "mamba2": {"num_hidden_layers": 1, "expand": 128},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp", "moe"]},
    "bamba": {
        "num_hidden_layers": 2,
        "attn_layer_indices": [1],
        "intermediate_size": 5,
        "mamba_expand": 4,
    },
    "granitemoehybrid": {
        "num_hidden_layers": 2,
        "layer_types": ["mamba", "attention"],
        "mamba_expand": 4,
    },
}


@pytest.mark.parametrize(("family", "options"), CASES)
def test_files_and_models_of_transformers(tmp_path, family, options):
    model = saved_by_transformers(family, {**SIZES, **options}, tmp_path)
    check_files(model, tmp_path)
    check_whole_model(model, tmp_path)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        (
            "nemotron_h",
            {
                **{**NEMOTRON, "layers_block_type": ["attention", "moe"]},
                "num_experts_per_tok": 2,
                "mlp_bias": True,
            },
        ),
        ("nemotron_h", {**NEMOTRON, "use_conv_bias": False, "use_bias": True, "mlp_bias": True}),
        ("bamba", {**BAMBA, "intermediate_size": 20}),
        ("granitemoehybrid", {**BAMBA, "num_local_experts": 0, "attention_bias": True}),
    ],
)
def test_decoders_of_unusual_configs(tmp_path, family, options):
    """Biases of shared experts, no layer that attends, no experts."""
    check_decoder(family, {**SIZES, **options}, tmp_path)


@pytest.mark.parametrize(("family", "options"), ALMOST_EMPTY.items())
def test_f_176_absent_entries_mean_what_transformers_takes_them_for(family, options):
    given = {"vocab_size": 3, "hidden_size": 64, **options}
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(family, **given)
        model = transformers.AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    layout = FAMILIES[family].layout(given).named(shapes)
    ours = {name: shape for rule in layout.rules for name, shape in rule.shapes.items()}
    assert ours == {name: shape for name, shape in shapes.items() if name not in layout.ties}


def test_mamba_130m_has_as_many_parameters_as_was_published():
    sizes = {"vocab_size": 50280, "hidden_size": 768, "num_hidden_layers": 24}
    assert num_parameters("mamba", **sizes) == 129_135_360


def test_every_family_has_a_case():
    assert {family for family, _ in CASES} == ALMOST_EMPTY.keys() == HYBRID_FAMILIES.keys()


def test_published_patterns_are_read_as_lists_are():
    """Nemotron-H's own configs have a string."""
    options = dict(CASES[5][1])
    kinds = options.pop("layers_block_type")
    family = FAMILIES["nemotron_h"]
    config = {**SIZES, **options, "hybrid_override_pattern": "M*-E"}
    listed = family.layout({**SIZES, **options, "layers_block_type": kinds})
    assert family.layout(config) == listed
