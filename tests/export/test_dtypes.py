"""Each tensor is written in the dtype that is asked for, if that can say its values."""

import json

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
from safetensors.torch import load_file

from megablocks_core.auto import decoder_from_hf
from megablocks_core.export import load_hf, save_hf, verify
from megablocks_core.groups import Mesh
from megablocks_core.layers import Decoder, DecoderSpec
from megablocks_core.testing import ranks
from tests.export.quantised_folders import quantise_fp8
from tests.export.tiny_models import pretrained

COMMON = {"vocab_size": 10, "hidden_size": 16, "num_hidden_layers": 2, "eos_token_id": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "n_group": 1,
    "topk_group": 1,
    "intermediate_size": 16,
}
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "first_k_dense_replace": 1,
}
MIXER = {"state_size": 4, "n_groups": 1}
NEMOTRON = {
    "hybrid_override_pattern": "ME",
    "mamba_num_heads": 3,
    "mamba_head_dim": 8,
    "ssm_state_size": 4,
    "n_groups": 1,
    "moe_shared_expert_intermediate_size": 8,
}
MODELS = {
    "mamba2": {"num_heads": 4, "head_dim": 8, **MIXER},
    "nemotron_h": {**NEMOTRON, **HEADS, **EXPERTS},
    "deepseek_v3": {**HEADS, **LATENT, **EXPERTS},
}
# What transformers keeps in float32 beside bfloat16.
KEPT = {
    "mamba2": set(),
    "nemotron_h": {"gate.e_score_correction_bias", "gate.weight"},
    "deepseek_v3": {"gate.e_score_correction_bias", "gate.weight"},
}


def _codes(folder):
    file = safe_open(str(folder / "model.safetensors"), "pt")
    return {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118


def _saved(folder, family):
    """A folder in bfloat16 as transformers writes it."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **COMMON, **MODELS[family])
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder / "wide")
    options = {"dtype": torch.bfloat16}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "wide", **options)
    model.save_pretrained(folder / "in")
    return model


@pytest.mark.parametrize("family", list(MODELS))
def test_each_tensor_keeps_the_dtype_that_it_had(tmp_path, family):
    model = _saved(tmp_path, family)
    expected = _codes(tmp_path / "in")
    wide = {name for name, code in expected.items() if code == "F32"}
    assert {".".join(name.split(".")[-2:]) for name in wide} == KEPT[family]
    if family == "deepseek_v3":  # which a Decoder cannot be yet
        ours = model
    else:
        spec = DecoderSpec.from_hf(tmp_path / "in")
        ours = Decoder(spec, dtype=torch.float32)
        load_hf(ours, tmp_path / "in")
    save_hf(ours, tmp_path / "out", like=tmp_path / "in", dtype="like")
    verify(tmp_path / "out")
    assert _codes(tmp_path / "out") == expected
    first, second = (load_file(tmp_path / one / "model.safetensors") for one in ("in", "out"))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"


def test_a_decoder_in_bfloat16_gives_back_what_it_was_given(tmp_path):
    _saved(tmp_path, "nemotron_h")
    decoder = decoder_from_hf(tmp_path / "in")
    save_hf(decoder, tmp_path / "own")
    assert _codes(tmp_path / "own") != _codes(tmp_path / "in")
    save_hf(decoder, tmp_path / "out", like=tmp_path / "in", dtype="like")
    assert _codes(tmp_path / "out") == _codes(tmp_path / "in")
    # Wide and narrow ones come in another order than they stand in.
    header = (tmp_path / "out" / "model.safetensors").read_bytes()
    entries = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])
    for entry in (one for name, one in entries.items() if name != "__metadata__"):
        assert entry["data_offsets"][0] % (4 if entry["dtype"] == "F32" else 2) == 0


def test_a_quantised_folder_has_plain_dtypes(tmp_path):
    pretrained(tmp_path / "in", dtype=torch.bfloat16)
    quantise_fp8(tmp_path / "in")
    decoder = decoder_from_hf(tmp_path / "in", dtype=torch.float32)
    save_hf(decoder, tmp_path / "out", like=tmp_path / "in", dtype="like")
    assert set(_codes(tmp_path / "out").values()) == {"BF16"}


@ranks(1, 2)
def test_what_does_not_fit_is_named_before_anything_is_written(tmp_path):
    mesh = Mesh(tp=dist.get_world_size())
    world = mesh.group("tp")
    pretrained(tmp_path / "in")
    decoder = decoder_from_hf(tmp_path / "in", mesh=mesh)
    weights = dict(decoder.named_parameters())
    up, norm = weights["model.layers.1.mlp.up_proj.weight"], weights["model.norm.weight"]
    before = up.detach().clone()

    def refused(message, dtype):
        with pytest.raises(ValueError, match=message):
            save_hf(decoder, tmp_path / "out", group=world, dtype=dtype)
        dist.barrier()
        assert [path.name for path in tmp_path.iterdir()] == ["in"]
        dist.barrier()

    with torch.no_grad():
        if world.rank == world.size - 1:  # a value that one rank holds
            up[-1, -1] = 7e4
        refused("infinite in model.layers.1.mlp.up_proj.weight as torch.float16", torch.float16)
        save_hf(decoder, tmp_path / "bf16", group=world, dtype=torch.bfloat16)
        up.copy_(before)
        if world.rank == world.size - 1:
            up[-1, -1] = 3.4e38
        refused_names = "infinite in model.layers.1.mlp.up_proj.weight as torch.bfloat16"
        with pytest.raises(ValueError, match=refused_names):
            save_hf(decoder, tmp_path / "out", group=world, dtype=torch.bfloat16)
        # A share may vanish; a tensor may not.
        up.copy_(before)
        if world.rank == 0:
            up[:] = 1e-9
        if world.size > 1:
            save_hf(decoder, tmp_path / "half", group=world, dtype=torch.float16)
        up[:] = 1e-9
        norm.fill_(1e-9)
        names = "model.layers.1.mlp.up_proj.weight as torch.float16, model.norm.weight as"
        with pytest.raises(ValueError, match=f"all become zero in {names}"):
            save_hf(decoder, tmp_path / "out", group=world, dtype=torch.float16)
        up.zero_()
        norm.fill_(1)
        save_hf(decoder, tmp_path / "zeros", group=world, dtype=torch.float16)
    assert not (tmp_path / "out").exists()


def test_dtypes_that_a_plain_folder_has_not_are_refused(tmp_path):
    pretrained(tmp_path / "in")
    decoder = decoder_from_hf(tmp_path / "in")
    for dtype in (torch.float8_e4m3fn, torch.int8, "bfloat16"):
        with pytest.raises(ValueError, match="dtype=.* must be one of torch.bfloat16"):
            save_hf(decoder, tmp_path / "out", dtype=dtype)
    with pytest.raises(ValueError, match="dtype='like' needs a folder like="):
        save_hf(decoder, tmp_path / "out", dtype="like")
