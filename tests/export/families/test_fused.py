"""Files of GPT-OSS and Llama 4 into our tensors and into transformers' models, and back."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from megablocks_core.export import load_hf, save_hf, verify
from megablocks_core.export.families import FAMILIES
from megablocks_core.export.families.fused import FUSED_FAMILIES
from megablocks_core.export.verifying import layout_of
from tests.export.family_checks import check_files, check_whole_model, saved_by_transformers
from tests.export.logical_model import assert_round_trip, loaded, logical_model, written

SIZES: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
HEADS = {"num_key_value_heads": 2, "head_dim": 6}
GPT_OSS = {**HEADS, "num_local_experts": 3, "num_experts_per_tok": 2}
LLAMA4 = {**HEADS, "num_local_experts": 3, "intermediate_size_mlp": 24}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("gpt_oss", GPT_OSS),
    ("gpt_oss", {**GPT_OSS, "attention_bias": False, "tie_word_embeddings": True}),
    ("llama4_text", LLAMA4),
    ("llama4_text", {**LLAMA4, "interleave_moe_layer_step": 2, "attention_bias": True}),
    ("llama4_text", {**LLAMA4, "moe_layers": [0, 2], "tie_word_embeddings": True}),
    ("llama4_text", {**LLAMA4, "moe_layers": []}),
]
VISION: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vision_output_dim": 12,
    "image_size": 4,
    "patch_size": 2,
    "projector_input_dim": 10,
    "projector_output_dim": 14,
}


@pytest.mark.parametrize(("family", "options"), CASES)
def test_files_and_models_of_transformers(tmp_path, family, options):
    model = saved_by_transformers(family, {**SIZES, **options}, tmp_path)
    check_files(model, tmp_path)
    check_whole_model(model, tmp_path)


def test_every_family_has_a_case():
    assert {family for family, _ in CASES} | {"llama4"} == FUSED_FAMILIES.keys()


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("gpt_oss", SIZES),
        ("llama4_text", SIZES),
        ("llama4_text", {**SIZES, "interleave_moe_layer_step": 2}),
        ("llama4", {"text_config": SIZES}),
    ],
)
def test_f_176_absent_entries_mean_what_transformers_takes_them_for(family, config):
    full = transformers.AutoConfig.for_model(family, **config)
    with torch.device("meta"):
        model: Any = getattr(transformers, FAMILIES[family].architecture)(full)
    held = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert FAMILIES[family].layout(config).schema == held


@pytest.fixture
def images(tmp_path):
    """A folder of Llama 4 with its vision tower, and the model."""
    torch.manual_seed(1)
    text = {**SIZES, **LLAMA4, "interleave_moe_layer_step": 2}
    config = transformers.Llama4Config(text_config=text, vision_config=VISION)
    model = transformers.Llama4ForConditionalGeneration(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "images")
    return tmp_path / "images", model


def test_llama_4_with_its_vision_tower(images):
    folder, model = images
    check_files(model, folder)
    again = transformers.Llama4ForConditionalGeneration(model.config)
    load_hf(again, folder)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    save_hf(again, folder / "theirs")
    assert written(folder / "theirs").keys() == written(folder).keys()


def test_a_language_model_alone_is_filled_from_a_folder_with_a_vision_tower(images, tmp_path):
    folder, model = images
    layout = replace(layout_of(json.loads((folder / "config.json").read_text())), beside=())
    ours = logical_model(layout)
    load_hf(ours, folder)
    values = dict(ours.named_parameters())
    assert not any(name.startswith(("vision", "multi")) for name in values)
    text = layout_of(json.loads(model.config.text_config.to_json_string()))
    assert values.keys() == set(text.order)
    up = model.language_model.model.layers[1].feed_forward.experts.gate_up_proj[2, :, 20:].T
    assert torch.equal(values["model.layers.1.mlp.experts.2.up_proj.weight"], up)
    with pytest.raises(ValueError, match=r"vision_model\.class_embedding"):
        save_hf(ours, tmp_path / "out", like=folder)
    assert not (tmp_path / "out").exists()


def test_a_missing_tensor_of_the_vision_tower_is_named(images):
    folder, model = images
    tensors = load_file(folder / "model.safetensors")
    del tensors["vision_model.class_embedding"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"vision_model\.class_embedding"):
        verify(folder)
    with pytest.raises(ValueError, match=r"vision_model\.class_embedding"):
        load_hf(model, folder)


@pytest.mark.parametrize("family", ["gpt_oss", "llama4_text"])
def test_f_168_expert_i_holds_i(tmp_path, family):
    options = {**SIZES, **(GPT_OSS if family == "gpt_oss" else LLAMA4)}
    saved_by_transformers(family, options, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensor.copy_(torch.arange(3.0).view(3, *[1] * (tensor.dim() - 1)))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ours = dict(assert_round_trip(tmp_path, tmp_path / "out").named_parameters())
    found = {name: values for name, values in ours.items() if ".experts." in name}
    assert len(found) == (6 if family == "gpt_oss" else 3) * 3 * 3
    for name, values in found.items():
        assert (values == int(name.split(".experts.")[1].split(".")[0])).all(), name


@pytest.mark.parametrize("family", ["gpt_oss", "llama4_text"])
def test_f_169_the_orientation_is_the_familys_though_shapes_are_square(tmp_path, family):
    """[E inputs outputs] with E=2 and inputs and outputs of 4, of either product in turn."""
    for ffn, name in ((4, "down_proj"), (2, "gate_up_proj")):
        folder = tmp_path / name
        sizes = {"vocab_size": 11, "hidden_size": 4, "num_attention_heads": 2, "head_dim": 2}
        options = {"intermediate_size": ffn, "num_local_experts": 2, "num_experts_per_tok": 1}
        options |= {"num_hidden_layers": 1, "num_key_value_heads": 2}
        model = saved_by_transformers(family, sizes | options, folder)
        tensors = load_file(folder / "model.safetensors")
        (key,) = (key for key in tensors if key.endswith(f"experts.{name}"))
        values = torch.arange(32.0).view(2, 4, 4)
        assert tensors[key].shape == values.shape
        save_file(tensors | {key: values}, folder / "model.safetensors", {"format": "pt"})
        ours = dict(loaded(folder).named_parameters())
        expert = "model.layers.0.mlp.experts.1"
        if name == "down_proj":
            wanted = {"down": values[1].T}
        elif family == "gpt_oss":
            wanted = {"gate": values[1, :, ::2].T, "up": values[1, :, 1::2].T}
        else:
            wanted = {"gate": values[1, :, :2].T, "up": values[1, :, 2:].T}
        for part, expected in wanted.items():
            assert torch.equal(ours[f"{expert}.{part}_proj.weight"], expected)
        check_files(model, folder)


def test_biases_and_sinks_of_gpt_oss(tmp_path):
    model = saved_by_transformers("gpt_oss", {**SIZES, **GPT_OSS}, tmp_path)
    ours = dict(loaded(tmp_path).named_parameters())
    layer, experts = model.model.layers[1], model.model.layers[1].mlp.experts
    expected = {
        "self_attn.sinks": layer.self_attn.sinks,
        "self_attn.o_proj.bias": layer.self_attn.o_proj.bias,
        "mlp.gate.bias": layer.mlp.router.bias,
        "mlp.experts.2.gate_proj.bias": experts.gate_up_proj_bias[2, ::2],
        "mlp.experts.2.up_proj.bias": experts.gate_up_proj_bias[2, 1::2],
        "mlp.experts.2.down_proj.bias": experts.down_proj_bias[2],
    }
    for name, values in expected.items():
        assert torch.equal(ours[f"model.layers.1.{name}"], values), name
