"""Quantised folders are the same bytes from every layout, whole or not there, and read again."""

import copy
import json
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.testing import assert_close

from megablocks_core.export import (
    drafting,
    load_hf,
    save_hf,
    save_quantized_hf,
    slabs,
    verify,
)
from megablocks_core.export.differing import diff
from megablocks_core.export.quantising import Fp8, Fp8Blocks, Int4, Int8, Nvfp4
from megablocks_core.export.quantising.calibration import Calibration
from megablocks_core.export.quantising.config import FILE
from megablocks_core.export.source import HfFolder
from megablocks_core.files.safetensors import DTYPES, read_header
from megablocks_core.groups import Mesh, collect
from megablocks_core.layers import Decoder, DecoderSpec
from megablocks_core.testing import ranks
from tests.export.quantising.tiny_recipes import RECIPES, calibrated, tensors_of, tiny
from tests.export.tiny_models import FAMILIES

# How far weights are that are read again, by norm.
NEAR = {"fp8": 0.03, "fp8-blocks": 0.03, "nvfp4": 0.11, "int8": 0.01, "int4": 0.11}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_what_is_written_is_verified_and_read_again_near_what_it_was(tmp_path, name, family):
    model = tiny(family)
    out = tmp_path / "out"
    save_quantized_hf(model, out, recipe=RECIPES[name], calibration=calibrated(model.state_dict()))
    verify(out, values=True)
    assert (out / FILE).exists() == (name != "fp8-blocks")
    again = copy.deepcopy(model)
    load_hf(again, out)
    for key, tensor in model.state_dict().items():
        found = again.state_dict()[key]
        if RECIPES[name].takes(key):
            near = (found.float() - tensor.float()).norm() / tensor.float().norm()
            assert 0 < near < NEAR[name], key
        else:
            assert torch.equal(found, tensor), key
    save_hf(model, tmp_path / "plain")
    lines = list(diff(tmp_path / "plain", out))
    assert any("q_proj.weight" in line for line in lines)
    assert not any("norm" in line or "shape" in line for line in lines)
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and "lm_head" in str(config["quantization_config"])


@pytest.mark.parametrize("sizes", [(1, 4), pytest.param((1, 2), marks=pytest.mark.slow)], ids=str)
@ranks(4)
def test_every_layout_writes_the_same_bytes_in_many_files(sizes, tmp_path):
    if dist.get_rank() == 0:
        tiny().save_pretrained(tmp_path / "in")
    dist.barrier()
    calibration = calibrated(HfFolder(tmp_path / "in").tensors)
    world = Mesh().group("dp")
    for tp in sizes:
        decoder = Decoder(
            DecoderSpec.from_hf(tmp_path / "in"), mesh=Mesh(tp=tp), dtype=torch.bfloat16
        )
        load_hf(decoder, tmp_path / "in")
        with patch.object(slabs, "SLAB_BYTES", 700), patch.object(collect, "ROUND_BYTES", 9000):
            for name, recipe in RECIPES.items():
                save_quantized_hf(
                    decoder,
                    tmp_path / f"{name}-{tp}",
                    recipe=recipe,
                    calibration=calibration,
                    group=world,
                    max_file_bytes=4000,
                )
    if world.rank == 0:
        for name, recipe in RECIPES.items():
            save_quantized_hf(
                tiny(),
                tmp_path / name,
                recipe=recipe,
                calibration=calibration,
                like=tmp_path / "in",
            )
            first = bytes_of(tmp_path / f"{name}-1")
            assert first == bytes_of(tmp_path / f"{name}-{tp}")
            assert len(first) > 4
            whole, parts = tensors_of(tmp_path / name), tensors_of(tmp_path / f"{name}-{tp}")
            assert whole.keys() == parts.keys()
            for key, tensor in whole.items():
                same = torch.equal(tensor.float(), parts[key].float())
                assert same and tensor.dtype == parts[key].dtype, key
            verify(tmp_path / f"{name}-{tp}", values=True)
    dist.barrier()


@ranks(4)
def test_experts_dealt_to_ranks_are_written_as_whole_ones_are(tmp_path):
    with patch.dict(FAMILIES, {"mixtral": MIXTRAL}):
        model = tiny("mixtral")
    if dist.get_rank() == 0:
        model.save_pretrained(tmp_path / "in")
    dist.barrier()
    names = HfFolder(tmp_path / "in").tensors
    calibration, world = calibrated(names), Mesh().group("dp")
    for sizes in ({"ep": 1}, {"ep": 2}, {"ep": 2, "tp": 2}):
        decoder = Decoder(
            DecoderSpec.from_hf(tmp_path / "in"), mesh=Mesh(**sizes), dtype=torch.bfloat16
        )
        load_hf(decoder, tmp_path / "in")
        for name in ("fp8", "nvfp4"):
            out = tmp_path / f"{name}-{''.join(sizes)}-{sizes['ep']}"
            save_quantized_hf(
                decoder, out, recipe=RECIPES[name], calibration=calibration, group=world
            )
    if world.rank == 0:
        for name in ("fp8", "nvfp4"):
            first = bytes_of(tmp_path / f"{name}-ep-1")
            assert first == bytes_of(tmp_path / f"{name}-ep-2")
            assert first == bytes_of(tmp_path / f"{name}-eptp-2")
            found = tensors_of(tmp_path / f"{name}-ep-2")
            gate = "model.layers.0.block_sparse_moe.gate.weight"
            assert torch.equal(found[gate], model.state_dict()["model.layers.0.mlp.gate.weight"])
            ignored = json.loads((tmp_path / f"{name}-ep-2" / FILE).read_text())["quantization"]
            assert gate.removesuffix(".weight") in ignored["exclude_modules"]
            experts = {key for key in found if ".experts." in key and key.endswith(".weight")}
            assert len(experts) == 24
            if name == "nvfp4":
                for key in experts:
                    pair = key.replace(".w1.", ".w3.")
                    scales = found[f"{key}_scale_2"], found[f"{pair}_scale_2"]
                    assert ".w2." in key or ".w3." in key or torch.equal(*scales)
            verify(tmp_path / f"{name}-ep-2", values=True)
    dist.barrier()


@pytest.mark.parametrize("name", RECIPES)
def test_values_are_held_some_at_a_time_and_wide_tensors_lie_first(tmp_path, name):
    model, most = tiny(hidden_size=256, intermediate_size=320), 2**14
    taken, add = [], drafting.FolderDraft.add

    def noted(draft, slab, values):
        taken.append(sum(one.nbytes for one in values))
        add(draft, slab, values)

    with (
        patch.object(slabs, "SLAB_BYTES", most),
        patch.object(drafting.FolderDraft, "add", noted),
    ):
        save_quantized_hf(
            model,
            tmp_path / "out",
            recipe=RECIPES[name],
            calibration=calibrated(model.state_dict()),
        )
    # A box in blocks is widened to whole ones: here 20 rows on either side at most.
    widest = 320 * 2 * (40 if name == "fp8-blocks" else 1)
    assert most / 2 < max(taken) <= most + widest
    entries = read_header_of(tmp_path / "out" / "model.safetensors")
    sizes = [DTYPES[entry.dtype].itemsize for entry in entries]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) > 1


def read_header_of(path):
    """Entries in the order of the file."""
    data = path.read_bytes()
    entries = read_header(lambda start, stop: data[start:stop], len(data)).values()
    return sorted(entries, key=lambda entry: entry.offset)


def test_tensors_are_converted_before_they_are_quantised(tmp_path):
    """A folder is that of the plain folder in the same dtype."""
    model = tiny(dtype=torch.float32)
    calibration = calibrated(model.state_dict())
    recipe = Nvfp4(kv_cache=False)
    save_quantized_hf(
        model, tmp_path / "a", recipe=recipe, calibration=calibration, dtype=torch.bfloat16
    )
    save_quantized_hf(model.bfloat16(), tmp_path / "b", recipe=recipe, calibration=calibration)
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (
        tmp_path / "b" / "model.safetensors"
    ).read_bytes()
    with safe_open(tmp_path / "a" / "model.safetensors", "pt") as file:
        assert file.get_tensor("model.norm.weight").dtype == torch.bfloat16


def test_scales_are_those_of_the_calibration(tmp_path):
    model = tiny()
    calibration = calibrated(model.state_dict())
    save_quantized_hf(model, tmp_path / "out", recipe=Fp8(), calibration=calibration)
    found = tensors_of(tmp_path / "out")
    k_proj = "model.layers.1.self_attn.k_proj"
    for name, amax in (
        ("input_scale", calibration.inputs[f"{k_proj}.weight"]),
        ("k_scale", calibration.keys[f"{k_proj}.weight"]),
    ):
        assert_close(found[f"{k_proj}.{name}"], torch.tensor(amax / 448), rtol=1e-7, atol=0)
    v_scale = found["model.layers.1.self_attn.v_proj.v_scale"]
    amax = calibration.values["model.layers.1.self_attn.v_proj.weight"]
    assert_close(v_scale, torch.tensor(amax / 448), rtol=1e-7, atol=0)
    bare = Fp8(kv_cache=False)
    save_quantized_hf(model, tmp_path / "bare", recipe=bare, calibration=calibration)
    assert not [name for name in tensors_of(tmp_path / "bare") if ".k_scale" in name]
    verify(tmp_path / "bare", values=True)


def test_weights_of_zeros_are_zeros(tmp_path):
    model = tiny()
    name = "model.layers.0.mlp.down_proj.weight"
    with torch.no_grad():
        model.get_parameter(name).zero_()
    for key, recipe in RECIPES.items():
        save_quantized_hf(
            model, tmp_path / key, recipe=recipe, calibration=calibrated(model.state_dict())
        )
        verify(tmp_path / key, values=True)
        assert not HfFolder(tmp_path / key).tensors[name][...].any()


def test_what_stays_as_it_is_can_be_said(tmp_path):
    model = tiny()
    recipe = Int8(exclude=("model.layers.0.*",), include=("lm_head",))
    save_quantized_hf(model, tmp_path / "out", recipe=recipe)
    found = tensors_of(tmp_path / "out")
    assert found["lm_head.weight"].dtype == torch.int8
    kept = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(found[kept], model.state_dict()[kept])
    assert found["model.layers.1.mlp.up_proj.weight"].dtype == torch.int8
    verify(tmp_path / "out", values=True)
    ignored = json.loads((tmp_path / "out" / FILE).read_text())["quantization"]["exclude_modules"]
    assert kept.removesuffix(".weight") in ignored and "lm_head" not in ignored


def _without(calibration, kind, name):
    kept = {key: value for key, value in getattr(calibration, kind).items() if key != name}
    return replace(calibration, **{kind: kept})


def test_what_cannot_be_quantised_is_named_and_nothing_is_written(tmp_path):
    model = tiny()
    good = calibrated(model.state_dict())
    q, k, v = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv")
    wide = tiny(dtype=torch.float64)
    with torch.no_grad():
        wide.get_parameter(q)[0, 0] = 1e300
    for recipe, calibration, message, more in (
        (Fp8(), None, "calibration=None must be one", {}),
        (Fp8(), _without(good, "inputs", q), f"calibration.inputs must have {q}", {}),
        (Fp8(), _without(good, "keys", k), f"calibration.keys must have {k}", {}),
        (Nvfp4(), _without(good, "values", v), f"calibration.values must have {v}", {}),
        (Fp8(), replace(good, keys={**good.keys, k: 0.0}), "must be above 0 and finite", {}),
        (Fp8(), {"inputs": {}}, "must be a Calibration", {}),
        ("fp8", None, "recipe='fp8' must be one, such as", {}),
        (Int4(), None, r"\[32, 32\] must have rows of whole groups of 128", {}),
        (Int8(exclude=("*",)), None, "must take a weight of the model", {}),
        (Int8(exclude=("*.q_proj",)), None, "must leave all of q, k and v", {}),
        (Int8(), None, "max_file_bytes=0 must be", {"max_file_bytes": 0}),
        (Int8(), None, "dtype=torch.int8 must be one of", {"dtype": torch.int8}),
    ):
        with pytest.raises(ValueError, match=message):
            save_quantized_hf(
                model, tmp_path / "out", recipe=recipe, calibration=calibration, **more
            )
    with pytest.raises(ValueError, match="q_proj.weight must have values that float32 holds"):
        save_quantized_hf(wide, tmp_path / "out", recipe=Fp8(), calibration=good)
    with torch.no_grad():
        model.get_parameter(q)[0, 0] = torch.nan
    with pytest.raises(ValueError, match=f"must be finite, but are not in {q}"):
        save_quantized_hf(model, tmp_path / "out", recipe=Fp8Blocks())
    assert not list(tmp_path.iterdir())


def test_gpt2_has_no_weights_that_servers_read_quantised(tmp_path):
    with patch.dict(FAMILIES, {"gpt2": {}}):
        model = tiny("gpt2", n_positions=16)
    with pytest.raises(ValueError, match="must take a weight of the model"):
        save_quantized_hf(model, tmp_path / "out", recipe=Int8())
    with pytest.raises(ValueError, match="kv_cache=True must be False"):
        save_quantized_hf(
            model,
            tmp_path / "out",
            recipe=Fp8(include=("*.c_fc",)),
            calibration=calibrated(
                [f"transformer.h.{layer}.mlp.c_fc.weight" for layer in range(2)]
            ),
        )


@ranks(2)
def test_a_full_disk_and_ranks_that_disagree_leave_nothing(tmp_path):
    world, model = Mesh().group("dp"), tiny()
    write = drafting.SafetensorsWriter

    def full(path, *args, **options):
        if world.rank == 1:
            raise OSError(28, "No space left on device")
        return write(path, *args, **options)

    kind, message = (OSError, "No space") if world.rank == 1 else (RuntimeError, "failed on rank 1")
    with patch.object(drafting, "SafetensorsWriter", full), pytest.raises(kind, match=message):
        save_quantized_hf(model, tmp_path / "out", recipe=Int8(), group=world, max_file_bytes=3000)
    for arguments, name in (
        ({"recipe": (Int8(), Int4(group_size=16))[world.rank]}, "recipe"),
        (
            {
                "recipe": Fp8(),
                "calibration": Calibration(
                    {**calibrated(model.state_dict()).inputs, "a": float(world.rank)}, {}, {}
                ),
            },
            "calibration",
        ),
    ):
        with pytest.raises(ValueError, match=rf"agree on \['{name}'\]"):
            save_quantized_hf(model, tmp_path / "out", group=world, **arguments)
    world.all_gather_object(None)
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]
