"""Both shapes say the same, and are read again as what was said."""

import json

import pytest

from megablocks_core.export.quantising import Fp8, Fp8Blocks, Int4, Int8, Nvfp4
from megablocks_core.export.quantising.config import (
    ENTRY,
    FILE,
    Settings,
    excluded_modules,
    quantization_config,
    quantization_file,
    settings_of,
)

EXCLUDED = ("lm_head", "model.layers.*.mlp.gate")
RECIPES = (
    Fp8(),
    Fp8(kv_cache=False),
    Fp8Blocks(block=(64, 32)),
    Nvfp4(),
    Nvfp4(kv_cache=False),
    Int8(),
    Int4(group_size=64),
)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_each_shape_alone_and_both_are_read_as_what_was_said(recipe, tmp_path):
    settings = Settings(recipe, EXCLUDED)
    config, file = {ENTRY: quantization_config(settings)}, quantization_file(settings)
    assert settings_of(config, tmp_path) == settings
    assert (file is None) == isinstance(recipe, Fp8Blocks)
    if file is not None:
        (tmp_path / FILE).write_text(json.dumps(file))
        assert settings_of(config, tmp_path) == settings == settings_of({}, tmp_path)
        assert file["producer"] == config[ENTRY]["producer"]
        (tmp_path / FILE).write_text(json.dumps(config[ENTRY]))  # as ModelOpt 1.0 will
        assert settings_of(config, tmp_path) == settings
    assert settings_of({}, tmp_path / "none") is None
    assert settings_of({ENTRY: {"quant_method": "mxfp4"}}, tmp_path / "none") is None


def test_the_words_of_published_folders():
    """As ModelOpt 0.47 and DeepSeek-V3's authors write them."""
    settings = Settings(Fp8(), ("lm_head",))
    eight = {"dynamic": False, "num_bits": 8, "type": "float"}
    producer = {"name": "modelopt", "version": "0.47.0"}
    assert quantization_file(settings) == {
        "producer": producer,
        "quantization": {
            "quant_algo": "FP8",
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": ["lm_head"],
        },
    }
    assert quantization_config(settings) == {
        "config_groups": {
            "group_0": {"input_activations": eight, "weights": eight, "targets": ["Linear"]}
        },
        "ignore": ["lm_head"],
        "quant_algo": "FP8",
        "kv_cache_scheme": eight,
        "producer": producer,
        "quant_method": "modelopt",
    }
    four = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    groups = quantization_config(Settings(Nvfp4(kv_cache=False), ()))["config_groups"]
    assert groups["group_0"]["weights"] == groups["group_0"]["input_activations"] == four
    groups = quantization_config(Settings(Int4(group_size=32), ()))["config_groups"]["group_0"]
    assert groups["weights"] == {**four, "type": "int", "group_size": 32}
    assert "input_activations" not in groups
    assert quantization_config(Settings(Fp8Blocks(), ("lm_head",))) == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }


def test_groups_of_integers_have_their_size_from_the_file_where_the_config_lacks_it(tmp_path):
    settings = Settings(Int4(group_size=32), EXCLUDED)
    flat = quantization_config(settings)
    del flat["config_groups"]
    with pytest.raises(ValueError, match="W4A16_AWQ"):
        settings_of({ENTRY: flat}, tmp_path)
    (tmp_path / FILE).write_text(json.dumps(quantization_file(settings)))
    assert settings_of({ENTRY: flat}, tmp_path) == settings


def test_files_that_disagree_and_formats_that_are_not_served_are_named(tmp_path):
    config = {ENTRY: quantization_config(Settings(Fp8(), ("lm_head",)))}
    for other in (Settings(Fp8(kv_cache=False), ("lm_head",)), Settings(Fp8(), ())):
        (tmp_path / FILE).write_text(json.dumps(quantization_file(other)))
        with pytest.raises(ValueError, match="must say the same"):
            settings_of(config, tmp_path)
    (tmp_path / FILE).unlink()
    flat = config[ENTRY]
    for changed, message in (
        ({**flat, "quant_algo": "W4A8_AWQ"}, "quant_algo='W4A8_AWQ' with the cache 'FP8'"),
        ({**flat, "kv_cache_scheme": "NVFP4"}, "with the cache 'NVFP4' is not served"),
        ({**flat, "ignore": "lm_head"}, "must be a list of patterns"),
        ({**flat, "config_groups": [1]}, "must name a format that is served"),
        ({"quant_method": "modelopt"}, "'quant_algo'"),
        ({"quant_method": "fp8"}, "'weight_block_size'"),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, "must be whole numbers"),
        ({"quant_method": "modelopt", "quantization": 3}, "must name a format"),
    ):
        with pytest.raises(ValueError, match=message):
            settings_of({ENTRY: changed}, tmp_path)


def test_which_weights_must_be_quantised_and_which_are_said_to_be_plain():
    settings = Settings(Int8(), ("model.layers.0.*", "lm_head"))
    assert settings.takes("model.layers.1.mlp.up_proj.weight", (4, 4))
    assert not settings.takes("model.layers.1.mlp.up_proj.weight", (2, 4, 4))
    assert not settings.takes("model.layers.0.mlp.up_proj.weight", (4, 4))
    assert settings.excludes("lm_head.weight") and not settings.excludes("model.norm.weight")
    kept = ["model.layers.0.mlp.experts.gate_up_proj", "lm_head.weight", "lm_head.weight"]
    assert excluded_modules(kept) == ("lm_head", "model.layers.0.mlp.experts")
