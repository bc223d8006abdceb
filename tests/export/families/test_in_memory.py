"""Models of transformers hold experts stacked: they are filled, and saved as it saves them."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megablocks_core.auto import decoder_from_hf
from megablocks_core.export import load_hf, save_hf
from megablocks_core.export.families import FAMILIES
from tests.export.family_checks import check_whole_model, saved_by_transformers
from tests.export.logical_model import assert_round_trip

SIZES: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 6, "layer_types": ["mamba", "attention"]}
NEMOTRON: dict[str, Any] = {
    **{name: size for name, size in SIZES.items() if name != "num_hidden_layers"},
    "layers_block_type": ["mamba", "attention", "mlp", "moe"],
    "head_dim": 6,
    "mamba_num_heads": 4,
    "mamba_head_dim": 6,
    "ssm_state_size": 5,
    "n_groups": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "moe_shared_expert_intermediate_size": 14,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {**SIZES, "num_local_experts": 3}),
    "mixtral-tied": ("mixtral", {**SIZES, "num_local_experts": 3, "tie_word_embeddings": True}),
    "qwen2_moe": ("qwen2_moe", {**SIZES, **EXPERTS, "shared_expert_intermediate_size": 14}),
    "qwen3_moe": ("qwen3_moe", {**SIZES, **EXPERTS, "mlp_only_layers": [0]}),
    "olmoe": ("olmoe", {**SIZES, "num_experts": 3, "num_experts_per_tok": 2}),
    "granitemoehybrid": (
        "granitemoehybrid",
        {**SIZES, **MAMBA, "num_local_experts": 3, "shared_intermediate_size": 24},
    ),
    "granitemoehybrid-dense": (
        "granitemoehybrid",
        {**SIZES, **MAMBA, "num_local_experts": 0, "shared_intermediate_size": 24},
    ),
    "nemotron_h": ("nemotron_h", NEMOTRON),
}


@pytest.mark.parametrize("case", CASES)
def test_a_model_on_meta_is_filled_and_saved_as_transformers_saves_it(tmp_path, case):
    model = saved_by_transformers(*CASES[case], tmp_path)
    check_whole_model(model, tmp_path)
    assert_round_trip(tmp_path, tmp_path / "ours")


@pytest.mark.parametrize("max_file_bytes", [2**30, 6000])
@pytest.mark.parametrize("case", CASES)
def test_a_model_of_transformers_and_a_decoder_write_the_same_bytes(tmp_path, case, max_file_bytes):
    model = saved_by_transformers(*CASES[case], tmp_path / "weights")
    decoder = decoder_from_hf(tmp_path / "weights")
    folders = tmp_path / "theirs", tmp_path / "ours"
    for one, folder in zip((model, decoder), folders, strict=True):
        save_hf(one, folder, like=tmp_path / "weights", max_file_bytes=max_file_bytes)
    theirs, ours = ({path.name: path.read_bytes() for path in f.iterdir()} for f in folders)
    assert theirs == ours
    count = sum(name.endswith(".safetensors") for name in ours)
    assert count == 1 if max_file_bytes > 6000 else count > 2


def test_every_family_with_experts_has_rows():
    """Experts are stacked in memory in all of them."""
    fused_on_disk = {"gpt_oss", "llama4", "llama4_text"}
    sparse = {
        name
        for name, family in FAMILIES.items()
        if any(".experts." in weight.name for weight in family.weights)
    } | {"granitemoehybrid"}
    assert {name for name, family in FAMILIES.items() if family.in_memory} == sparse - fused_on_disk


def test_f_168_a_stack_without_one_expert_on_disk_is_not_filled(tmp_path):
    model = saved_by_transformers(*CASES["mixtral"], tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    lost = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    del tensors[lost]
    save_file(tensors, file)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.gate_up_proj"):
        load_hf(model, tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(before[name], tensor), name
