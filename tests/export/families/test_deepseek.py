"""Files of DeepSeek-V2 and V3, Kimi K2 and GLM-4.5 into ours and into transformers' models."""

import json
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megablocks_core.export import load_hf, verify
from megablocks_core.export.families import FAMILIES
from megablocks_core.export.families.deepseek import DEEPSEEK_FAMILIES
from megablocks_core.export.verifying import layout_of
from tests.export.family_checks import (
    TOKENS,
    check_files,
    check_whole_model,
    saved_by_transformers,
)
from tests.export.logical_model import assert_round_trip, loaded, logical_model

SIZES: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 5,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 2,
    "qk_nope_head_dim": 4,
    "v_head_dim": 6,
    "num_key_value_heads": 4,
}
GROUPS = {"n_group": 2, "topk_group": 1}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("deepseek_v3", {**LATENT, **GROUPS}),
    ("deepseek_v3", {**LATENT, **GROUPS, "q_lora_rank": None, "first_k_dense_replace": 0}),
    ("deepseek_v3", {**LATENT, **GROUPS, "attention_bias": True, "first_k_dense_replace": 3}),
    (
        "deepseek_v3",
        {**LATENT, **GROUPS, "attention_bias": True, "q_lora_rank": None}
        | {"tie_word_embeddings": True},
    ),
    ("deepseek_v2", LATENT),
    ("deepseek_v2", {**LATENT, "q_lora_rank": None, "attention_bias": True, "mlp_bias": True}),
    ("deepseek_v2", {**LATENT, "attention_bias": True}),
    ("glm4_moe", {"num_key_value_heads": 2, "head_dim": 6, "n_shared_experts": 1}),
    ("glm4_moe", {"num_key_value_heads": 2, "use_qk_norm": True, "tie_word_embeddings": True}),
    ("glm4_moe", {"num_key_value_heads": 4, "attention_bias": True, **GROUPS}),
]


@pytest.mark.parametrize(("family", "options"), CASES)
def test_files_and_models_of_transformers(tmp_path, family, options):
    model = saved_by_transformers(family, {**SIZES, **EXPERTS, **options}, tmp_path)
    check_files(model, tmp_path)
    check_whole_model(model, tmp_path)


def test_every_family_has_a_case():
    assert {family for family, _ in CASES} | {"kimi_k2"} == DEEPSEEK_FAMILIES.keys()


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe"])
def test_f_176_absent_entries_mean_what_transformers_takes_them_for(family, tmp_path):
    full = transformers.AutoConfig.for_model(family, **SIZES)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(full)
    held = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    layout = FAMILIES[family].layout(SIZES)
    rules = layout.named(held).rules
    assert held == {name: shape for rule in rules for name, shape in rule.shapes.items()}


def test_kimi_k2_has_the_names_of_deepseek_v3(tmp_path):
    model = saved_by_transformers("deepseek_v3", {**SIZES, **EXPERTS, **LATENT, **GROUPS}, tmp_path)
    _edit(tmp_path, model_type="kimi_k2", num_nextn_predict_layers=0)
    check_files(model, tmp_path)
    ours = dict(loaded(tmp_path).named_parameters())
    up = model.model.layers[2].mlp.experts.gate_up_proj[3, 12:]
    assert torch.equal(ours["model.layers.2.mlp.experts.3.up_proj.weight"], up)


@pytest.mark.parametrize("absent", ["n_routed_experts", "first_k_dense_replace", "kv_lora_rank"])
def test_sizes_of_kimi_k2_are_never_those_of_deepseek_v3_by_default(absent):
    config = {**SIZES, **EXPERTS, **LATENT}
    FAMILIES["kimi_k2"].layout(config)
    del config[absent]
    with pytest.raises(ValueError, match=absent):
        FAMILIES["kimi_k2"].layout(config)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_the_layer_that_predicts_later_tokens_is_not_read(tmp_path, family):
    options = {**SIZES, **EXPERTS, **(LATENT if family == "deepseek_v3" else {})}
    model = saved_by_transformers(family, options | GROUPS | {"num_key_value_heads": 4}, tmp_path)
    before = loaded(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {
        name.replace("layers.2.", "layers.3."): tensor.clone()
        for name, tensor in tensors.items()
        if "layers.2." in name
    }
    assert any("experts.3.up" in name for name in extra)
    extra |= {
        f"model.layers.3.{name}.weight": torch.full((2,), torch.nan)
        for name in ("enorm", "hnorm", "eh_proj", "embed_tokens")
        + ("shared_head.norm", "shared_head.head")
    }
    save_file(tensors | extra, tmp_path / "model.safetensors")
    verify(tmp_path)
    after = dict(loaded(tmp_path).named_parameters())
    for name, parameter in before.named_parameters():
        assert torch.equal(parameter, after[name]), name
    with torch.device("meta"):
        again: Any = type(model)(model.config).eval()
    load_hf(again, tmp_path, device="cpu")
    with torch.no_grad():
        assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)

    strange = {"model.layers.3.strange.weight": torch.zeros(2)}
    save_file(tensors | extra | strange, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"layers\.3\.strange"):
        loaded(tmp_path)
    save_file(tensors | extra, tmp_path / "model.safetensors")
    _edit(tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(ValueError, match=r"layers\.3\.enorm"):
        verify(tmp_path)


def test_tables_of_old_files_are_not_read(tmp_path):
    saved_by_transformers("deepseek_v3", {**SIZES, **EXPERTS, **LATENT, **GROUPS}, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(3):
        tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors")
    verify(tmp_path)
    loaded(tmp_path)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_f_168_expert_i_holds_i(tmp_path, family):
    options = {**SIZES, **EXPERTS, **LATENT, **GROUPS}
    saved_by_transformers(family, options, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensor.fill_(float(name.split(".experts.")[1].split(".")[0]))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ours = dict(assert_round_trip(tmp_path, tmp_path / "out").named_parameters())
    for expert in range(4):
        for name in ("gate", "up", "down"):
            values = ours[f"model.layers.1.mlp.experts.{expert}.{name}_proj.weight"]
            assert (values == expert).all()


@pytest.mark.parametrize("expert", [3, 4])
def test_f_168_tensors_without_a_partner_are_named(tmp_path, expert):
    """One that is missing, and one too many."""
    options = {**SIZES, **EXPERTS, **LATENT, **GROUPS}
    saved_by_transformers("deepseek_v3", options, tmp_path)
    layout = layout_of(json.loads((tmp_path / "config.json").read_text()))
    tensors = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.1.mlp.experts.{expert}.up_proj.weight"
    if tensors.pop(name, None) is None:
        tensors[name] = torch.zeros(12, 16)
    save_file(tensors, tmp_path / "model.safetensors")
    model = logical_model(layout)
    with pytest.raises(ValueError, match=name):
        load_hf(model, tmp_path)
    assert all(parameter.isnan().all() for parameter in model.parameters())


def _edit(folder, **entries):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def test_published_folders_are_fp8_in_blocks_with_a_layer_behind_the_last(tmp_path):
    saved_by_transformers("deepseek_v3", {**SIZES, **EXPERTS, **LATENT, **GROUPS}, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    behind = {
        name.replace("layers.2.", "layers.3."): tensor.clone()
        for name, tensor in tensors.items()
        if "layers.2." in name
    }
    stored = tensors | behind
    for name in [name for name in stored if "_proj" in name]:
        stored[name] = stored[name].to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = torch.full((1, 1), 2.0)
    save_file(stored, tmp_path / "model.safetensors")
    words = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    _edit(tmp_path, quantization_config=words | {"activation_scheme": "dynamic"})
    verify(tmp_path)
    ours = logical_model(layout_of(json.loads((tmp_path / "config.json").read_text())))
    load_hf(ours, tmp_path)
    values = dict(ours.named_parameters())
    for expert in range(4):
        name = f"model.layers.2.mlp.experts.{expert}.up_proj.weight"
        assert torch.equal(values[name], 2 * stored[name].float())
    assert torch.equal(values["model.norm.weight"], tensors["model.norm.weight"])
