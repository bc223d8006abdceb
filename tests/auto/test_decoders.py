"""A decoder with published weights in one call, at any layout."""

import json

import pytest
import torch
import torch.distributed as dist
import transformers

from megablocks_core.auto import decoder_from_hf
from megablocks_core.export.families import FAMILIES
from megablocks_core.groups import Mesh, gather_whole
from megablocks_core.layers.spec.families import MISSING
from megablocks_core.testing import ranks
from tests.export.references import MODELS

TOKENS = torch.arange(12).view(2, 6) % 10


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@ranks(1, 2, 4)
def test_logits_are_those_of_transformers(tmp_path, family):
    reference = _saved(tmp_path, family, torch.float64)
    mesh = Mesh(tp=dist.get_world_size())
    decoder = decoder_from_hf(tmp_path, mesh=mesh)
    for name, tensor in gather_whole(decoder).items():
        assert torch.equal(tensor, reference.state_dict()[name]), name
    with torch.no_grad():
        logits = decoder(TOKENS, gather_logits=True).logits
        expected = reference(TOKENS).logits
    # transformers rounds to float32 inside norms and rotary tables, in float64 models too.
    assert (logits - expected).norm() <= 2e-6 * expected.norm()


def test_dtype_is_the_one_asked_for_else_the_folders(tmp_path):
    _saved(tmp_path, "llama", torch.bfloat16)
    assert decoder_from_hf(tmp_path).lm_head.weight.dtype == torch.bfloat16
    wide = decoder_from_hf(tmp_path, dtype=torch.float64)
    assert wide.lm_head.weight.dtype == torch.float64
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "dtype": "float99"}))
    with pytest.raises(ValueError, match="dtype='float99' in config.json"):
        decoder_from_hf(tmp_path)
    del config["dtype"]
    path.write_text(json.dumps(config))
    assert decoder_from_hf(tmp_path).lm_head.weight.dtype == torch.float32


@pytest.mark.parametrize("dtype", ["float32", torch.int8, torch.float8_e4m3fn, torch.complex64])
def test_a_dtype_that_no_model_computes_in_is_refused(tmp_path, dtype):
    _saved(tmp_path, "llama", torch.float32)
    message = f"dtype={dtype!r} must be one of torch.bfloat16, torch.float16, torch.float32"
    with pytest.raises(ValueError, match=message):
        decoder_from_hf(tmp_path, dtype=dtype)


def test_every_family_of_files_is_served_or_its_missing_part_is_named(tmp_path):
    served = {family for family, _ in MODELS.values()}
    assert FAMILIES.keys() - served == MISSING.keys()
    for family, part in MISSING.items():
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
        message = f"^model_type='{family}': a Decoder has no {part} yet; load_hf fills"
        with pytest.raises(ValueError, match=message):
            decoder_from_hf(tmp_path)


def _saved(folder, family, dtype):
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=10,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        tie_word_embeddings=family == "qwen3",
    )
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    if not dist.is_initialized() or dist.get_rank() == 0:
        model.save_pretrained(folder)
    if dist.is_initialized():
        dist.barrier()
    return model
