"""A model on meta gets memory, its ties and the tables that no checkpoint holds."""

import pytest
import torch
import transformers
from torch import nn

from megablocks_core.export import load_hf
from megablocks_core.export.materialize import computed_tables, materialize

TOKENS = torch.arange(12).view(2, 6)
CPU = torch.device("cpu")


def _model(family, **options):
    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=12,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        **options,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_a_transformers_model_on_meta_gets_its_rotary_tables_back(tmp_path, family):
    scaling = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    if family == "gemma3_text":
        kinds = ("full_attention", "sliding_attention")
        scaling = {kind: {**scaling, "rope_theta": 700.0 + len(kind)} for kind in kinds}
    reference = _model(family, rope_parameters=scaling)
    reference.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(reference.config)
    load_hf(model, tmp_path)
    assert torch.equal(model(TOKENS).logits, reference(TOKENS).logits)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied == reference.config.tie_word_embeddings


def test_buffers_on_meta_that_cannot_be_computed_are_named(tmp_path):
    reference = _model("llama")
    reference.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(reference.config)
        model.model.norm.register_buffer("table", torch.ones(3), persistent=False)
    with pytest.raises(ValueError, match=r"buffers \['model.norm.table'\] are on meta"):
        load_hf(model, tmp_path)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_ties_dtypes_and_gradient_flags_are_kept():
    with torch.device("meta"):
        first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        second.weight = first.weight
        first.bias.requires_grad_(False)
        first.register_buffer("count", torch.zeros((), dtype=torch.int64))
    here = nn.Linear(2, 2)
    kept = here.weight
    module = nn.Sequential(first, second, here)
    materialize(module, computed_tables(module, CPU), CPU)
    assert not any(tensor.is_meta for tensor in module.state_dict().values())
    assert second.weight is first.weight and here.weight is kept
    assert not first.bias.requires_grad and second.bias.requires_grad
    assert first.count.dtype == torch.int64
