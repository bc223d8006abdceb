"""The table says exactly what transformers writes, for every option of every family."""

import pytest
import transformers
from safetensors.torch import load_file

from megablocks_core.export.families import FAMILIES, Family, Weight

SIZES = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
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
    )
    for tied in (False, True)
]


@pytest.mark.parametrize(("family", "options"), CASES)
def test_schema_is_what_transformers_writes(tmp_path, family, options):
    config = transformers.AutoConfig.for_model(family, **SIZES, **options)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    written = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert FAMILIES[family].schema(config.to_dict()) == written
    assert config.model_type == family and model.__class__.__name__ == FAMILIES[family].architecture


@pytest.mark.parametrize("family", list(FAMILIES))
def test_f_176_absent_entries_mean_what_transformers_takes_them_for(family):
    config = {name: SIZES[name] for name in SIZES if not name.startswith(("num_key", "head_dim"))}
    for absent in ({}, {"num_key_value_heads": None}) if family != "mistral" else ({},):
        given = {**config, "hidden_size": 64, "num_attention_heads": 32, **absent}
        full = transformers.AutoConfig.for_model(family, **given)
        model = transformers.AutoModelForCausalLM.from_config(full)
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        assert FAMILIES[family].schema(given) == shapes


def test_sizes_that_are_missing_are_named():
    with pytest.raises(ValueError, match="vocab_size"):
        FAMILIES["llama"].schema({"hidden_size": 4})


def test_renames_are_inverted():
    family = Family(
        "X",
        (
            Weight("h.{}.attn.w", "hidden", ours="layers.{}.weight"),
            Weight("wte", "vocab", ours="embed.weight"),
            Weight("same", "hidden"),
        ),
    )
    for theirs, ours in (
        ("h.12.attn.w", "layers.12.weight"),
        ("wte", "embed.weight"),
        ("same", "same"),
        ("h.x.attn.w", "h.x.attn.w"),
    ):
        assert family.ours(theirs) == ours
        assert family.theirs(ours) == theirs
    assert family.ignores("model.layers.3.self_attn.rotary_emb.inv_freq")
    assert not family.ignores("model.layers.x.self_attn.rotary_emb.inv_freq")
