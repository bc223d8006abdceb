"""Configs of models with state-space blocks are read without losing a feature, and written back."""

import json
from dataclasses import replace

import pytest
from transformers import AutoConfig

from megablocks_core.layers import DecoderSpec
from tests.layers.spec.hybrid_configs import CONFIGS, config_of

PATTERNS = {
    "mamba": "MMM",
    "mamba2": "MM",
    "nemotron_h": "M*-E",
    "bamba": "M-*-",
    "granitemoehybrid": "M-*-",
}


@pytest.mark.parametrize("family", CONFIGS)
def test_to_hf_reads_alike_here_and_in_transformers(family, tmp_path):
    config = config_of(family)
    spec = DecoderSpec.from_hf(config)
    written = spec.to_hf()
    (tmp_path / "config.json").write_text(json.dumps(written))
    again = AutoConfig.from_pretrained(tmp_path)
    assert DecoderSpec.from_hf(tmp_path) == DecoderSpec.from_hf(written) == spec
    ours, theirs = again.to_dict(), config.to_dict()
    differing = {key for key in theirs if ours.get(key) != theirs[key]}
    # What transformers does not read says here what it does.
    stated = {"time_step_limit"} if family == "nemotron_h" else set()
    assert differing == {"architectures", "_name_or_path", *stated}


@pytest.mark.parametrize("family", CONFIGS)
def test_the_pattern_is_that_of_the_blocks(family):
    spec = DecoderSpec.from_hf(config_of(family))
    assert spec.pattern == PATTERNS[family]
    assert spec.num_layers == len(spec.pattern)


@pytest.mark.parametrize("family", CONFIGS)
def test_what_transformers_saves_is_read(family, tmp_path):
    """With infinity in its own words."""
    config = config_of(family)
    config.save_pretrained(tmp_path)
    assert DecoderSpec.from_hf(tmp_path) == DecoderSpec.from_hf(config)


@pytest.mark.parametrize(
    ("family", "changes", "name"),
    [
        ("mamba", {"hidden_act": "relu"}, "hidden_act"),
        ("mamba", {"use_mystery": True}, "use_mystery"),
        ("nemotron_h", {"moe_latent_size": 8}, "moe_latent_size"),
        ("nemotron_h", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers"),
        ("nemotron_h", {"n_shared_experts": 2}, "n_shared_experts"),
        ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("bamba", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type"),
    ],
)
def test_what_a_decoder_does_not_have_is_named(family, changes, name):
    config = {**config_of(family).to_dict(), **changes}
    with pytest.raises(ValueError, match=name):
        DecoderSpec.from_hf(config)


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        ("mamba", "pattern", "M*M"),
        ("bamba", "residual_scale", 0.5),
        ("bamba", "rotary_dim", 2),
        ("mamba2", "float32_residual", False),
        ("nemotron_h", "rope", True),
        ("nemotron_h", "tied", True),
        ("nemotron_h", "hidden_dropout", 0.5),
        ("granitemoehybrid", "gated_mlp", False),
    ],
)
def test_what_a_config_cannot_name_raises(family, name, value):
    spec = DecoderSpec.from_hf(config_of(family))
    if name == "float32_residual":
        assert replace(spec, float32_residual=value).to_hf()["residual_in_fp32"] is False
        return
    changes = {name: value}
    if name == "pattern":
        changes |= {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    with pytest.raises(ValueError, match=f"^{name}="):
        replace(spec, **changes).to_hf()
