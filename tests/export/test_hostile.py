"""Folders whose config, index or files lie are refused by name, never by what torch trips over."""

import json
import os

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file

from megablocks_core.auto import decoder_from_hf
from megablocks_core.export import load_hf, save_hf, verify
from megablocks_core.export.differing import diff
from megablocks_core.files import read_json
from megablocks_core.groups import Mesh
from megablocks_core.layers import Decoder, DecoderSpec
from megablocks_core.parallel import tensor_parallelize
from megablocks_core.testing import ranks
from tests.export.quantised_folders import quantise_fp8, quantise_mxfp4, tiny_gpt_oss
from tests.export.tiny_models import assert_same, pretrained, tiny_model

HUGE = 10**30
SIZES = {
    "hidden_size": ("x", 0, HUGE, 2**40, {}, [1]),
    "num_hidden_layers": ("x", 1.5, HUGE, 2**40, -1, True),
    "num_attention_heads": (0, [], "x", HUGE),
    "head_dim": ({}, HUGE, 1.5, "x"),
    "vocab_size": (HUGE, "x", None, -1),
    "num_key_value_heads": (0, "x", HUGE),
    "intermediate_size": ({}, HUGE, "x", -1),
    "model_type": ([], {}, 3, None),
    "quantization_config": (3, "x", [1], {"quant_method": []}, {"quant_method": None}),
}
OPTIONS = {
    "hidden_act": ([], {}, "x"),
    "rope_parameters": (3, "x", [1], {"rope_type": []}),
    "dtype": (3, "int8", "Tensor", "float16x"),
    "rms_norm_eps": ("x", -1, []),
    "attention_dropout": ("x", [], 2),
}


def _changed(folder, **entries):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **entries}))


@pytest.mark.parametrize("name", SIZES)
def test_configs_that_cannot_be(tmp_path, name):
    model = pretrained(tmp_path / "in")
    before = (tmp_path / "in" / "config.json").read_text()
    for value in SIZES[name]:
        (tmp_path / "in" / "config.json").write_text(before)
        _changed(tmp_path / "in", **{name: value})
        with pytest.raises(ValueError):
            verify(tmp_path / "in")
        with pytest.raises(ValueError):
            decoder_from_hf(tmp_path / "in")
        with pytest.raises(ValueError):
            if name == "quantization_config":
                load_hf(model, tmp_path / "in")
            save_hf(model, tmp_path / "out", like=tmp_path / "in")
        assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_cannot_be(tmp_path, name):
    pretrained(tmp_path)
    before = (tmp_path / "config.json").read_text()
    for value in OPTIONS[name]:
        (tmp_path / "config.json").write_text(before)
        _changed(tmp_path, **{name: value})
        with pytest.raises(ValueError):
            decoder_from_hf(tmp_path)


def test_json_nested_beyond_reason_is_named(tmp_path):
    for text in ("[" * 100_000, '{"a":' * 100_000):
        (tmp_path / "config.json").write_text(text)
        for call in (verify, decoder_from_hf, lambda path: read_json(path / "config.json", dict)):
            with pytest.raises(ValueError, match=r"config\.json is not JSON"):
                call(tmp_path)


@pytest.mark.parametrize("file", ["../a.safetensors", "/etc/passwd", "..", ".", "", "a\0b", 7])
def test_an_index_that_names_what_is_no_file_of_the_folder(tmp_path, file):
    model = pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors, tmp_path / "a.safetensors")
    places: dict[str, object] = dict.fromkeys(tensors, "a.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {**places, "lm_head.weight": file}}))
    for call in (verify, lambda path: load_hf(model, path)):
        with pytest.raises(ValueError, match="outside its folder|is missing"):
            call(tmp_path)
    index.write_text(json.dumps({"weight_map": places}))
    verify(tmp_path)
    assert torch.equal(model.lm_head.weight, tiny_model().lm_head.weight)


_NAME = "model.layers.1.mlp.up_proj.weight"
_SCALE, _EXPERTS = f"{_NAME}_scale_inv", "model.layers.0.mlp.experts.down_proj"
# What is done to a tensor of a quantised folder, and what is said.
BROKEN = {
    "no scale": (_SCALE, None, r"up_proj\.weight_scale_inv is missing"),
    "no weight": (_NAME, None, r"up_proj\.weight is missing, but"),
    "scales of another shape": (_SCALE, lambda scale: scale[1:], r"must have \(3, 2\)"),
    "scales without dims": (_SCALE, lambda scale: scale[0, 0], r"has shape \(\) and must have"),
    "scales that are whole": (_SCALE, lambda scale: scale.int(), "is I32 and must be one of F32"),
    "scales of eight bits": (_SCALE, lambda scale: scale.to(torch.float8_e8m0fnu), "is F8_E8M0"),
    "a weight of other bits": (_NAME, lambda w: w.view(torch.uint8), "is U8 and must be F8_E4M3"),
    "a weight cut short": (_NAME, lambda weight: weight[:16], r"must have \(2, 2\)"),
    "no exponents": (f"{_EXPERTS}_scales", None, "down_proj_scales is missing"),
    "no blocks": (f"{_EXPERTS}_blocks", None, "down_proj_blocks is missing"),
    "fewer exponents": (f"{_EXPERTS}_scales", lambda whole: whole[:, 1:], "_scales has shape"),
    "blocks of half a group": (f"{_EXPERTS}_blocks", lambda w: w[..., :8], r"\[E O G 16\]"),
    "blocks of other bits": (f"{_EXPERTS}_blocks", lambda w: w.view(torch.int8), "must be U8"),
}


@pytest.mark.parametrize("damage", BROKEN)
@ranks(1, 2)
def test_quantised_folders_that_are_broken_change_nothing(tmp_path, damage):
    name, change, message = BROKEN[damage]
    model = _quantised(tmp_path, mxfp4="_proj_" in name)
    if dist.get_rank() == 0:
        tensors = load_file(tmp_path / "model.safetensors")
        whole = tensors.pop(name)
        if change is not None:
            tensors[name] = change(whole).contiguous()
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    dist.barrier()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        load_hf(model, tmp_path, group=Mesh().group("dp"))
    assert_same(before, model)
    with pytest.raises(ValueError, match=message):
        verify(tmp_path)


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_scales_that_are_no_numbers_are_named(tmp_path, kind):
    """Only values show them: a model is told to be filled, a folder when values are looked at."""
    name = _NAME if kind == "fp8" else _EXPERTS
    model = _quantised(tmp_path, mxfp4=kind == "mxfp4")
    tensors = load_file(tmp_path / "model.safetensors")
    scales = tensors[f"{name}_scale_inv" if kind == "fp8" else f"{name}_scales"]
    scales.view(-1)[1] = torch.nan if kind == "fp8" else 255
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    verify(tmp_path)
    with pytest.raises(ValueError, match=f"{name}.* has .* that are not"):
        verify(tmp_path, values=True)
    with pytest.raises(ValueError, match=rf"has been filled .* in \['{name}'\]"):
        load_hf(model, tmp_path)
    load_hf(model, tmp_path, allow_nonfinite=True)
    assert model.get_parameter(name).isnan().any()


def _quantised(folder, *, mxfp4):
    """A folder of blocks or of groups, and a model of other values that it fits."""
    model = tiny_gpt_oss() if mxfp4 else tiny_model(dtype=torch.bfloat16)
    if not dist.is_initialized() or dist.get_rank() == 0:
        model.save_pretrained(folder)
        (quantise_mxfp4 if mxfp4 else quantise_fp8)(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    return model


def _with_header(file, text, length=None):
    """A copy of a file's tensors under another header."""
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    size = len(text) if length is None else length
    file.write_bytes(size.to_bytes(8, "little") + text + data[end:])


def _header(file):
    data = file.read_bytes()
    return data[8 : 8 + int.from_bytes(data[:8], "little")]


def test_headers_that_lie_change_nothing(tmp_path):
    model = pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    good, header = file.read_bytes(), json.loads(_header(file))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    text = json.dumps(header).encode()
    first = dict(header["model.norm.weight"])
    for lie, length, message in (
        (text, 2 * len(good), "cannot be in a file of"),
        (text, 2**63 - 1, "cannot be in a file of"),
        (text, 2**64 - 1, "cannot be in a file of"),
        (text[:-1], None, "is not JSON"),
        ({**header, "__metadata__": ["pt"]}, None, "__metadata__ must hold texts by name"),
        ({**header, "__metadata__": {"format": {}}}, None, "__metadata__ must hold texts by name"),
        ({**header, "model.norm.weight": {**first, "shape": [2] * 99}}, None, "cannot be: "),
        ({**header, "model.norm.weight": {**first, "dtype": "F4"}}, None, "cannot be: "),
    ):
        lie = lie if isinstance(lie, bytes) else json.dumps(lie).encode()
        file.write_bytes(good)
        _with_header(file, lie, length)
        for read in (verify, lambda path: load_hf(model, path), decoder_from_hf):
            with pytest.raises(ValueError, match=rf"model\.safetensors is damaged.*{message}"):
                read(tmp_path)
        assert_same(before, model)


def test_a_header_as_long_as_others_accept_is_read_and_a_longer_one_is_not(tmp_path):
    reference, model = pretrained(tmp_path), tiny_model()
    file = tmp_path / "model.safetensors"
    text = _header(file)
    _with_header(file, text + b" " * (100_000_000 - len(text)))
    with torch.no_grad():
        model.model.norm.weight.zero_()
    load_hf(model, tmp_path)
    assert_same(model.state_dict(), reference)
    with file.open("r+b") as opened:  # all else is a hole
        opened.write((100_000_001).to_bytes(8, "little"))
        opened.truncate(200_000_000)
    with pytest.raises(ValueError, match="a header of 100000001 bytes cannot be"):
        load_hf(model, tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_pipes_are_not_waited_for(tmp_path, name):
    model = pretrained(tmp_path / "in")
    (tmp_path / "in" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "in" / name)
    if name == "tokenizer.json":  # what is no file is not copied
        save_hf(model, tmp_path / "out", like=tmp_path / "in")
        assert name not in os.listdir(tmp_path / "out")
        assert list(diff(tmp_path / "in", tmp_path / "out"))
        return
    for read in (verify, lambda path: load_hf(model, path), decoder_from_hf):
        with pytest.raises(ValueError, match=f"{name} is missing"):
            read(tmp_path / "in")


@pytest.mark.parametrize("kind", ["decoder", "transformers"])
@ranks(1, 2)
def test_models_on_meta_stay_there_if_a_folder_is_broken_and_cannot_be_written(tmp_path, kind):
    """Whole, and cut."""
    reference = pretrained(tmp_path / "in")
    mesh = Mesh(tp=dist.get_world_size())
    world = mesh.group("tp")
    if kind == "decoder":
        model = Decoder(DecoderSpec.from_hf(tmp_path / "in"), mesh=mesh, device="meta")
    else:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(reference.config)
        if world.size > 1:
            tensor_parallelize(model, group=world)
    with pytest.raises(ValueError, match=r"must have values, but \['model\..* are on meta"):
        save_hf(model, tmp_path / "out", group=world)
    file = tmp_path / "in" / "model.safetensors"
    good = file.read_bytes()
    dist.barrier()
    if world.rank == 0:
        file.write_bytes(good[:-1])
    dist.barrier()
    with pytest.raises(ValueError, match="is damaged or cut short"):
        load_hf(model, tmp_path / "in", group=world)
    assert all(tensor.is_meta for tensor in model.parameters())
    dist.barrier()
    if world.rank == 0:
        file.write_bytes(good)
    dist.barrier()
    load_hf(model, tmp_path / "in", group=world, device="cpu")
    last = model.get_parameter("model.embed_tokens.weight")
    with torch.no_grad():
        norm = model.get_parameter("model.norm.weight").to("meta")
        model.get_submodule("model.norm").weight = torch.nn.Parameter(norm)
    assert not last.is_meta
    with pytest.raises(ValueError, match=r"but \['model\.norm\.weight'\] are on meta"):
        save_hf(model, tmp_path / "out", group=world)
    dist.barrier()
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
