"""Hugging Face folders round-trip bit for bit at any layout, and what does not fit is named."""

import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from megablocks_core.export import load_hf, save_hf, verify
from megablocks_core.groups import Mesh, gather_whole, marks
from megablocks_core.layers import Decoder, DecoderSpec
from megablocks_core.parallel import tensor_parallelize
from megablocks_core.testing import ranks

TOKENS = torch.arange(12).view(2, 6) % 10
SIZES = {
    "vocab_size": 10,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {"head_dim": 8, "tie_word_embeddings": True},
}


def _model(family="llama", dtype=torch.float32, **options):
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(
        family,
        **{**SIZES, **FAMILIES[family], **options},
    )
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def _pretrained(folder, family="llama", **options):
    """A transformers model saved by transformers; written by the first rank."""
    model = _model(family, **options)
    if not dist.is_initialized() or dist.get_rank() == 0:
        model.save_pretrained(folder)
    if dist.is_initialized():
        dist.barrier()
    return model


def _assert_same(tensors, model):
    expected = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name in tensors or name != "lm_head.weight"
    }
    assert set(tensors) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name


@pytest.mark.parametrize("family", list(FAMILIES))
@ranks(1, 2, 4)
def test_f_166_f_175_round_trip_is_bit_exact_and_logits_are_equal(tmp_path, family):
    mesh = Mesh(tp=dist.get_world_size())
    world = mesh.group("tp")
    reference = _pretrained(tmp_path / "in", family)
    decoder = Decoder(DecoderSpec.from_hf(tmp_path / "in"), mesh=mesh)
    load_hf(decoder, tmp_path / "in", group=world)
    _assert_same(gather_whole(decoder), reference)

    save_hf(decoder, tmp_path / "out", group=world)
    if world.rank == 0:
        verify(tmp_path / "out")
        written = load_file(tmp_path / "out" / "model.safetensors")
        assert ("lm_head.weight" in written) == (family == "llama")
        assert written["model.embed_tokens.weight"].shape[0] == 10
        _assert_same(written, reference)
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert again.dtype == torch.float32
        assert torch.equal(again(TOKENS).logits, reference(TOKENS).logits)
    assert not torch.cuda.is_initialized()


@ranks(4)
def test_every_layout_writes_the_same_bytes_in_many_files(tmp_path):
    _pretrained(tmp_path / "in")
    for tp in (1, 2, 4):
        mesh = Mesh(tp=tp)
        decoder = Decoder(DecoderSpec.from_hf(tmp_path / "in"), mesh=mesh)
        load_hf(decoder, tmp_path / "in")
        save_hf(decoder, tmp_path / f"{tp}", group=Mesh().group("dp"), max_file_bytes=3000)
    if dist.get_rank() == 0:
        verify(tmp_path / "4")
        first, *others = [
            {path.name: path.read_bytes() for path in (tmp_path / f"{tp}").iterdir()}
            for tp in (1, 2, 4)
        ]
        assert others == [first, first] and len(first) > 4
        names = [name for name in first if name.startswith("model-")]
        assert max(len(first[name]) for name in names) < 3000 + 2000
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "4")
        _assert_same(again.state_dict(), _model())
    dist.barrier()
    sharded = Decoder(DecoderSpec.from_hf(tmp_path / "in"), mesh=Mesh(tp=2))
    load_hf(sharded, tmp_path / "4", group=Mesh().group("dp"))
    _assert_same(gather_whole(sharded), _model())


@pytest.mark.parametrize("family", list(FAMILIES))
@ranks(1, 2)
def test_a_decoder_on_meta_gets_memory_and_its_own_slices(tmp_path, family):
    reference = _pretrained(tmp_path / "in", family)
    mesh = Mesh(tp=dist.get_world_size())
    decoder = Decoder(DecoderSpec.from_hf(tmp_path / "in"), mesh=mesh, device="meta")
    load_hf(decoder, tmp_path / "in", group=mesh.group("tp"))
    assert not any(parameter.is_meta for parameter in decoder.parameters())
    assert len(list(marks(decoder))) == len(list(decoder.parameters()))
    _assert_same(gather_whole(decoder), reference)
    logits = decoder(TOKENS, gather_logits=True).logits
    torch.testing.assert_close(logits, reference(TOKENS).logits)


@pytest.mark.parametrize("family", list(FAMILIES))
@ranks(2)
def test_a_transformers_model_cut_on_meta_is_filled_and_written(tmp_path, family):
    reference = _pretrained(tmp_path / "in", family)
    tp = Mesh(tp=2).group("tp")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(reference.config)
    tensor_parallelize(model, group=tp)
    load_hf(model, tmp_path / "in", group=tp)
    assert sum(p.numel() for p in model.parameters()) < sum(
        p.numel() for p in reference.parameters()
    )
    torch.testing.assert_close(model(TOKENS).logits, reference(TOKENS).logits)
    save_hf(model, tmp_path / "out", group=tp)
    dist.barrier()
    _assert_same(load_file(tmp_path / "out" / "model.safetensors"), reference)


def test_f_168_every_name_on_both_sides_is_covered_or_listed(tmp_path):
    reference = _pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    kept = tensors.pop("model.norm.weight")
    extra = {"model.extra": torch.ones(2), "lm_head.weight": torch.ones(10, 17)}
    save_file({**tensors, **extra}, path)
    for model in (_model(), Decoder(DecoderSpec.from_hf(tmp_path))):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(ValueError) as caught:
            load_hf(model, tmp_path)
        for part in (
            "the folder lacks ['model.norm.weight']",
            "the model lacks ['model.extra']",
            "lm_head.weight has shape (10, 16), on disk (10, 17)",
        ):
            assert part in str(caught.value)
        _assert_same(before, model)
    tables = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    save_file({**tensors, "model.norm.weight": kept, **tables}, path)
    model = Decoder(DecoderSpec.from_hf(tmp_path))
    load_hf(model, tmp_path)
    _assert_same(model.state_dict(), reference)


@ranks(2)
def test_a_folder_that_does_not_fit_raises_on_all_ranks(tmp_path):
    _pretrained(tmp_path)
    mesh = Mesh(tp=2)
    decoder = Decoder(DecoderSpec.from_hf(tmp_path), mesh=mesh)
    if dist.get_rank() == 1:
        decoder.register_parameter("stranger", nn.Parameter(torch.ones(1)))
    with pytest.raises(ValueError, match=r"the folder lacks \['stranger'\]"):
        load_hf(decoder, tmp_path, group=mesh.group("tp"))


def test_tied_heads(tmp_path):
    tied = _pretrained(tmp_path / "tied", tie_word_embeddings=True)
    loose = Decoder(DecoderSpec.from_hf(_model(tie_word_embeddings=False).config))
    load_hf(loose, tmp_path / "tied")  # the config ties what this model keeps apart
    assert torch.equal(loose.lm_head.weight, tied.model.embed_tokens.weight)

    path = tmp_path / "tied" / "model.safetensors"
    tensors = load_file(path)
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, path)
    decoder = Decoder(DecoderSpec.from_hf(tmp_path / "tied"))
    load_hf(decoder, tmp_path / "tied")
    verify(tmp_path / "tied")
    _assert_same(decoder.state_dict(), tied)
    save_file({**tensors, "lm_head.weight": head + 1}, path)
    for model in (decoder, loose):
        with pytest.raises(ValueError, match="are tied, but differ on disk"):
            load_hf(model, tmp_path / "tied")


def test_dtypes(tmp_path):
    _pretrained(tmp_path / "in", dtype=torch.bfloat16)
    decoder = Decoder(DecoderSpec.from_hf(tmp_path / "in"), dtype=torch.float64)
    load_hf(decoder, tmp_path / "in")
    save_hf(decoder, tmp_path / "out", dtype=torch.bfloat16)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for tensor in written.values())
    _assert_same(written, _model(dtype=torch.bfloat16))
    with torch.no_grad():
        decoder.get_parameter("model.norm.weight")[0] = 1e6
    with pytest.raises(ValueError, match="dtype=torch.float16 must hold the values of model.norm"):
        save_hf(decoder, tmp_path / "half", dtype=torch.float16)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_quantised_tensors_are_refused(tmp_path):
    _pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, path)
    with pytest.raises(ValueError, match="model.norm.weight is torch.float32, which F8_E4M3"):
        load_hf(Decoder(DecoderSpec.from_hf(tmp_path)), tmp_path)


def test_like_gives_config_and_tokenizer_files(tmp_path):
    reference = _pretrained(tmp_path / "in", eos_token_id=7)
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    (tmp_path / "in" / "notes.txt").write_text("mine")
    decoder = Decoder(DecoderSpec.from_hf(tmp_path / "in"))
    load_hf(decoder, tmp_path / "in")
    save_hf(decoder, tmp_path / "out", like=tmp_path / "in")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    again = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert again.to_diff_dict() == {**reference.config.to_diff_dict(), "dtype": "float32"}


def test_a_transformers_model_is_written_with_its_own_config(tmp_path):
    model = _model("qwen3")
    save_hf(model, tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)


def test_what_the_config_does_not_describe_is_not_written(tmp_path):
    _pretrained(tmp_path / "other", intermediate_size=28, mlp_bias=False)
    with pytest.raises(ValueError) as caught:
        save_hf(_model(), tmp_path / "out", like=tmp_path / "other")
    for part in (
        "not described ['model.layers.0.mlp.gate_proj.bias'",
        "model.layers.1.mlp.up_proj.weight has shape (24, 16), described as (28, 16)",
    ):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match="model_type='gpt2' must be one of llama"):
        config = json.loads((tmp_path / "other" / "config.json").read_text())
        (tmp_path / "other" / "config.json").write_text(
            json.dumps({**config, "model_type": "gpt2"})
        )
        save_hf(_model(), tmp_path / "out", like=tmp_path / "other")
    with pytest.raises(ValueError, match="the model has no spec or config"):
        save_hf(nn.Linear(1, 1), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_interrupted_export_leaves_nothing(tmp_path, monkeypatch):
    model = _model()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("a")
    with pytest.raises(ValueError, match="must be new or an empty folder"):
        save_hf(model, tmp_path / "full")

    def failing(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", failing)
    with pytest.raises(OSError, match="No space left"):
        save_hf(model, tmp_path / "out", max_file_bytes=2000)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_verify_compares_with_the_config(tmp_path):
    _pretrained(tmp_path)
    verify(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "vocab_size": 12}))
    with pytest.raises(ValueError, match=r"lm_head.weight has shape \(10, 16\), described as \(12"):
        verify(tmp_path)


def test_needs_no_transformers(tmp_path):
    _pretrained(tmp_path / "in")
    code = f"""
import sys
sys.modules["transformers"] = None
from megablocks_core.export import load_hf, save_hf, verify
from megablocks_core.layers import Decoder, DecoderSpec
model = Decoder(DecoderSpec.from_hf({str(tmp_path / "in")!r}), device="meta")
load_hf(model, {str(tmp_path / "in")!r})
save_hf(model, {str(tmp_path / "out")!r})
verify({str(tmp_path / "out")!r})
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    _assert_same(load_file(tmp_path / "out" / "model.safetensors"), _model())
