"""Files of Gemma 1 to 3 into our tensors and into transformers' model, and back."""

from typing import Any

import pytest
import torch
import transformers

from megablocks_core.export.families import FAMILIES
from tests.export.family_checks import (
    check_files,
    check_whole_model,
    num_parameters,
    saved_by_transformers,
)
from tests.export.logical_model import assert_round_trip

SIZES: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
}
CASES: tuple[dict[str, Any], ...] = (
    {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
    {"attention_bias": True, "tie_word_embeddings": False, "num_hidden_layers": 1},
    {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 5},
)


@pytest.mark.parametrize("options", CASES)
def test_files_and_models_of_transformers(tmp_path, options):
    model = saved_by_transformers("gemma3_text", {**SIZES, **options}, tmp_path)
    check_files(model, tmp_path)
    check_whole_model(model, tmp_path)


@pytest.mark.parametrize("family", ["gemma", "gemma2"])
@pytest.mark.parametrize("options", [{}, {"attention_bias": True, "num_hidden_layers": 1}])
def test_files_and_models_of_gemma_1_and_2(tmp_path, family, options):
    model = saved_by_transformers(family, {**SIZES, **options}, tmp_path)
    check_files(model, tmp_path)
    check_whole_model(model, tmp_path)


def test_gemma_2b_and_gemma_2_2b_have_as_many_parameters_as_was_published():
    sizes = {"vocab_size": 256000, "hidden_size": 2048, "intermediate_size": 16384}
    sizes |= {"num_hidden_layers": 18, "num_attention_heads": 8, "num_key_value_heads": 1}
    assert num_parameters("gemma", **sizes) == 2_506_172_416
    sizes = {"vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216}
    sizes |= {"num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4}
    assert num_parameters("gemma2", **sizes) == 2_614_341_888


def test_gemma_3_1b_has_as_many_parameters_as_was_published():
    sizes = {"vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912, "head_dim": 256}
    sizes |= {"num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1}
    assert num_parameters("gemma3_text", **sizes) == 999_885_952


def test_absent_entries_mean_what_transformers_takes_them_for():
    config = {name: SIZES[name] for name in SIZES if not name.startswith(("num_key", "head_dim"))}
    full = transformers.Gemma3TextConfig(**config)
    with torch.device("meta"):
        model = transformers.Gemma3ForCausalLM(full)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    schema = FAMILIES["gemma3_text"].layout(config).schema
    assert schema == {name: shape for name, shape in wanted.items() if name != "lm_head.weight"}


def test_norms_around_zero_keep_bits_that_a_sum_with_one_would_lose(tmp_path):
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(**SIZES)
    model = transformers.Gemma3ForCausalLM(config).to(torch.bfloat16)
    tiny = torch.linspace(-1e-3, 1e-3, 16).bfloat16()
    assert not torch.equal((tiny + 1) - 1, tiny)
    model.model.norm.weight.data.copy_(tiny)
    model.save_pretrained(tmp_path / "theirs")
    ours: Any = assert_round_trip(tmp_path / "theirs", tmp_path / "ours")
    assert torch.equal(ours.model.norm.weight, tiny)
