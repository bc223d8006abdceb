"""The table says exactly what transformers writes, for every option of every family."""

import pytest
import transformers
from safetensors.torch import load_file

from megablocks_core.export.families import FAMILIES
from megablocks_core.export.families.dense import DENSE_FAMILIES
from tests.export.family_checks import (
    check_files,
    check_whole_model,
    num_parameters,
    saved_by_transformers,
)

SIZES = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "num_experts_per_tok": 2,
}
CASES = [
    (family, {**options, "tie_word_embeddings": tied})
    for family, options in (
        ("llama", {}),
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("qwen3", {"attention_bias": True}),
        ("mixtral", {"num_local_experts": 3}),
        (
            "qwen3_moe",
            {"num_experts": 3, "moe_intermediate_size": 12, "attention_bias": True},
        ),
        (
            "qwen3_moe",
            {"num_experts": 2, "num_hidden_layers": 5, "decoder_sparse_step": 2}
            | {"mlp_only_layers": [1]},
        ),
        (
            "qwen2_moe",
            {"num_experts": 3, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 14},
        ),
        (
            "qwen2_moe",
            {"num_experts": 2, "num_hidden_layers": 4, "decoder_sparse_step": 2}
            | {"mlp_only_layers": [1], "moe_intermediate_size": 12}
            | {"shared_expert_intermediate_size": 14},
        ),
        (
            "qwen2_moe",
            {"num_experts": 3, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 14}
            | {"qkv_bias": False},
        ),
        ("qwen2_moe", {"num_experts": 0}),
        ("qwen3_moe", {"num_experts": 0}),
        ("qwen3_moe", {"num_experts": 3, "mlp_only_layers": [0, 1]}),
        ("olmoe", {"num_experts": 3, "head_dim": 4, "attention_bias": True}),
    )
    for tied in (False, True)
]


@pytest.mark.parametrize(("family", "options"), CASES)
def test_files_and_models_of_transformers(tmp_path, family, options):
    model = saved_by_transformers(family, {**SIZES, **options}, tmp_path)
    check_files(model, tmp_path)
    check_whole_model(model, tmp_path)


@pytest.mark.parametrize("family", list(DENSE_FAMILIES))
def test_f_176_absent_entries_mean_what_transformers_takes_them_for(family, tmp_path):
    config = {name: SIZES[name] for name in SIZES if not name.startswith(("num_key", "head_dim"))}
    for absent in ({}, {"num_key_value_heads": None}):
        if absent and family in ("mistral", "mixtral", "qwen2_moe", "qwen3_moe"):
            continue  # transformers needs the number there
        given = {**config, "hidden_size": 64, "num_attention_heads": 32, **absent}
        full = transformers.AutoConfig.for_model(family, **given)
        model = transformers.AutoModelForCausalLM.from_config(full)
        folder = tmp_path / str(len(absent))
        assert FAMILIES[family].layout(given).schema == _written(model, folder)


@pytest.mark.parametrize(
    ("family", "sizes", "heads", "options", "count"),
    [
        # Vocabulary, width, inner width and layers.
        ("llama", (128256, 4096, 14336, 32), (32, 8, 128), {}, 8_030_261_248),
        ("mistral", (32000, 4096, 14336, 32), (32, 8, 128), {}, 7_241_732_096),
        (
            "qwen2",
            (151936, 896, 4864, 24),
            (14, 2, 64),
            {"tie_word_embeddings": True},
            494_032_768,
        ),
        (
            "qwen3",
            (151936, 1024, 3072, 28),
            (16, 8, 128),
            {"tie_word_embeddings": True},
            596_049_920,
        ),
        (
            "mixtral",
            (32000, 4096, 14336, 32),
            (32, 8, 128),
            {"num_local_experts": 8},
            46_702_792_704,
        ),
        (
            "qwen3_moe",
            (151936, 2048, 6144, 48),
            (32, 4, 128),
            {"num_experts": 128, "moe_intermediate_size": 768},
            30_532_122_624,
        ),
        ("olmoe", (50304, 2048, 1024, 16), (16, 16, 128), {"num_experts": 64}, 6_919_161_856),
    ],
)
def test_published_models_have_as_many_parameters_as_was_published(
    family, sizes, heads, options, count
):
    """Llama 3.1 8B, Mistral 7B, Qwen2.5 0.5B, Qwen3 0.6B, Mixtral 8x7B, Qwen3 30B-A3B, OLMoE."""
    config = dict(zip(SIZES, (*sizes, *heads), strict=False))
    assert num_parameters(family, **config, **options) == count


def test_sizes_that_are_missing_are_named():
    with pytest.raises(ValueError, match="vocab_size"):
        FAMILIES["llama"].layout({"hidden_size": 4})


def test_names_of_experts_are_ours():
    config = {**SIZES, "num_local_experts": 3, "num_experts": 3}
    for family, theirs, ours in (
        ("mixtral", "block_sparse_moe.gate.weight", "mlp.gate.weight"),
        ("mixtral", "block_sparse_moe.experts.2.w3.weight", "mlp.experts.2.up_proj.weight"),
        ("qwen3_moe", "mlp.experts.2.up_proj.weight", "mlp.experts.2.up_proj.weight"),
    ):
        rules = FAMILIES[family].layout(config).rules
        names = {name: rule.ours for rule in rules for name in rule.theirs}
        assert names[f"model.layers.1.{theirs}"] == (f"model.layers.1.{ours}",)


def _written(model, folder):
    """Experts are fused in memory, and apart in files."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
