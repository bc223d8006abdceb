"""Entries are taken, inert or off; anything else raises."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megablocks_core.layers.spec.entries import Entries, as_dict, refuse_windows, rope


def test_what_is_on_and_not_taken_raises_by_name():
    entries = Entries({"size": 3, "extra": True, "off": False, "none": None, "use_cache": True})
    assert entries.need("size") == 3 and "none" in entries.null
    with pytest.raises(ValueError, match="config must have 'size'"):
        entries.need("size")
    with pytest.raises(ValueError, match="does not have: {'extra': True}"):
        entries.finish()
    assert entries.take("extra") is True
    entries.finish()


def test_rotary_entries_have_an_older_and_a_newer_place():
    assert rope(Entries({})) == {"rope_base": 10000.0, "rope_scaling": None}
    new = Entries({"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}})
    assert rope(new) == rope(Entries({"rope_theta": 5.0}))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_sliding_window": True, "max_window_layers": 3},
        {"use_sliding_window": True, "max_window_layers": 2},
        {"use_sliding_window": True, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "layer_types": ["full_attention"] * 3},
        {"use_sliding_window": True, "layer_types": ["full_attention"] * 2 + ["sliding_attention"]},
        {"use_sliding_window": False, "sliding_window": 4},
    ],
)
def test_windows_are_refused_where_a_layer_of_transformers_has_one(family, options):
    config = AutoConfig.for_model(
        family,
        **{"vocab_size": 3, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1},
        **{"head_dim": 4, "num_hidden_layers": 3, "intermediate_size": 4, "num_experts": 2},
        **{"sliding_window": 2, "max_window_layers": 2, **options},
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    slides = any(getattr(x.self_attn, "sliding_window", None) for x in model.model.layers)
    slides |= "sliding_attention" in getattr(config, "layer_types", ())
    given = {"sliding_window": 2, "max_window_layers": 2, **options}
    for entries in (config.to_dict(), given):
        raises = pytest.raises(ValueError, match="_window|layer_types") if slides else nullcontext()
        with raises:
            refuse_windows(Entries(entries), family, 3)


def test_configs_are_dicts_or_objects():
    assert as_dict({"a": 1}) == {"a": 1}
    assert as_dict(SimpleNamespace(to_dict=lambda: {"a": 1})) == {"a": 1}
