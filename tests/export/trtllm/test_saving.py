"""Checkpoints have the same bytes from any layout, appear whole or not at all, and fit a dtype."""

import json
import os
import signal
import subprocess
import sys
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megablocks_core.export import load_hf, save_trtllm, verify
from megablocks_core.export.quantising.calibration import Calibration
from megablocks_core.export.quantising.recipe import Fp8, Fp8Blocks, Int8
from megablocks_core.files import disk, is_unfinished
from megablocks_core.groups import Mesh
from megablocks_core.layers import Decoder, DecoderSpec
from megablocks_core.testing import ranks
from tests.export.family_checks import saved_by_transformers
from tests.export.logical_model import written
from tests.export.tiny_models import pretrained, tiny_model
from tests.export.trtllm.plain import MAMBA2, SIZES

FAMILY = {
    "llama": {"tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4},
}


def calibrated(names):
    """Made-up magnitudes, by names."""
    numbers = {name: 1.0 + len(name) + index % 7 for index, name in enumerate(sorted(names))}
    inputs = {name: value for name, value in numbers.items() if "_proj" in name or ".w" in name}
    keys = {name: 500.0 for name in names if name.endswith("k_proj.weight")}
    values = {name: 3.0 for name in names if name.endswith("v_proj.weight")}
    return Calibration(inputs, keys, values)


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def meshes(family, size):
    if family == "mixtral":
        return [Mesh(), Mesh(ep=2), Mesh(tp=2, ep=2)] if size == 4 else [Mesh(), Mesh(ep=2)]
    return [Mesh(tp=tp) for tp in (1, 2, 4) if tp <= size]


@pytest.mark.parametrize("recipe", [None, Fp8()], ids=["plain", "fp8"])
@pytest.mark.parametrize("family", list(FAMILY))
@ranks(2, 4)
def test_every_layout_writes_the_same_bytes(tmp_path, family, recipe):
    """tp 1, 2, 4 and ep 2 of the source, for a mapping that is none of these."""
    size = dist.get_world_size()
    world = Mesh().group("dp")
    if world.rank == 0:
        model = saved_by_transformers(family, {**SIZES, **FAMILY[family]}, tmp_path / "in")
        model.bfloat16().save_pretrained(tmp_path / "in")
    world.all_gather_object(None)
    found = calibrated(written(tmp_path / "in")) if recipe else None
    folders = []
    for number, mesh in enumerate(meshes(family, size)):
        spec = DecoderSpec.from_hf(tmp_path / "in")
        decoder = Decoder(spec, mesh=mesh, dtype=torch.bfloat16)
        load_hf(decoder, tmp_path / "in", group=world)
        folders.append(tmp_path / f"{number}")
        save_trtllm(decoder, folders[-1], tp=2, pp=2, group=world, recipe=recipe, calibration=found)
    if world.rank == 0:
        first, *others = map(bytes_of, folders)
        assert sorted(first) == ["config.json", *(f"rank{rank}.safetensors" for rank in range(4))]
        assert others and all(other == first for other in others)
        verify(folders[0], values=True)
    world.all_gather_object(None)


@ranks(2)
def test_mamba_2_from_a_decoder_that_is_cut(tmp_path):
    world = Mesh().group("dp")
    if world.rank == 0:
        saved_by_transformers("mamba2", MAMBA2, tmp_path / "in")
    world.all_gather_object(None)
    for tp in (1, 2):
        decoder = Decoder(DecoderSpec.from_hf(tmp_path / "in"), mesh=Mesh(tp=tp))
        load_hf(decoder, tmp_path / "in", group=world)
        save_trtllm(decoder, tmp_path / f"{tp}", tp=4, group=world, dtype=torch.float16)
    if world.rank == 0:
        assert bytes_of(tmp_path / "1") == bytes_of(tmp_path / "2")
        verify(tmp_path / "1", values=True)
    world.all_gather_object(None)


def test_f_183_dtypes_are_converted_with_a_check_and_declared(tmp_path):
    model = tiny_model(dtype=torch.bfloat16)
    for number, dtype in enumerate((None, torch.float16, torch.float32)):
        save_trtllm(model, tmp_path / f"{number}", dtype=dtype)
        config = json.loads((tmp_path / f"{number}" / "config.json").read_text())
        stored = {one.dtype for one in load_file(tmp_path / f"{number}/rank0.safetensors").values()}
        assert stored == {dtype or torch.bfloat16}
        assert config["dtype"] == str(dtype or torch.bfloat16).removeprefix("torch.")
    with torch.no_grad():
        model.model.norm.weight[0] = 70000
    with pytest.raises(ValueError, match=r"infinite in model.norm.weight as torch.float16"):
        save_trtllm(model, tmp_path / "out", dtype=torch.float16)
    assert not (tmp_path / "out").exists()
    save_trtllm(model, tmp_path / "out")
    assert load_file(tmp_path / "out/rank0.safetensors")["transformer.ln_f.weight"][0] == 70144


def test_a_head_that_is_tied_is_written(tmp_path):
    model = tiny_model("qwen3", torch.bfloat16)
    save_trtllm(model, tmp_path / "out")
    found = load_file(tmp_path / "out" / "rank0.safetensors")
    assert torch.equal(found["lm_head.weight"], found["transformer.vocab_embedding.weight"])
    assert torch.equal(found["lm_head.weight"], model.lm_head.weight)


def test_a_vocabulary_that_was_padded_for_training(tmp_path):
    model = tiny_model(dtype=torch.bfloat16)
    save_trtllm(model, tmp_path / "out", tp=4, vocab_size=9)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["vocab_size"], config["vocab_size_padded"]) == (9, 12)
    heads = [load_file(tmp_path / f"out/rank{rank}.safetensors") for rank in range(4)]
    head = torch.cat([found["lm_head.weight"] for found in heads])
    assert torch.equal(head[:9], model.lm_head.weight[:9])
    assert torch.equal(head[9], head[:9].double().mean(0).bfloat16())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 3}, "tp=3 must divide heads of queries"),
        ({"tp": 2, "moe_tp": 3}, "moe_tp=3 times moe_ep=1 must be tp=2"),
        ({"dtype": torch.float64}, "dtype=torch.float64 must be one of torch.float16"),
        ({"dtype": "like"}, "dtype='like' must be one of"),
        ({"recipe": Fp8Blocks()}, r"must be None, Fp8\(\) or Int8\(\)"),
        ({"recipe": "fp8"}, "recipe='fp8' must be None"),
        ({"recipe": Fp8()}, "calibration=None must be one for"),
        ({"recipe": Fp8(), "calibration": 3}, "calibration=3 must be a Calibration"),
        ({"recipe": Fp8(), "calibration": Calibration({}, {}, {})}, "inputs must have model.lay"),
        ({"recipe": Int8(exclude=("*",))}, "must take what it does by default"),
    ],
)
def test_what_cannot_be_is_named_and_nothing_is_written(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        save_trtllm(tiny_model(dtype=torch.bfloat16), tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_models_of_several_dtypes_need_one(tmp_path):
    model = tiny_model(dtype=torch.bfloat16)
    model.model.norm.float()
    with pytest.raises(ValueError, match="dtype=None must be one of .* for the weights are"):
        save_trtllm(model, tmp_path / "out")
    with pytest.raises(ValueError, match="dtype=None must be one of"):
        save_trtllm(tiny_model(dtype=torch.float64), tmp_path / "out")
    save_trtllm(model, tmp_path / "out", dtype=torch.bfloat16)


def test_a_folder_that_is_not_empty_stays(tmp_path):
    (tmp_path / "a").write_text("a")
    with pytest.raises(ValueError, match="must be new or an empty folder"):
        save_trtllm(tiny_model(dtype=torch.bfloat16), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@ranks(2)
def test_ranks_that_ask_for_different_mappings_are_told(tmp_path):
    world = Mesh().group("dp")
    model = tiny_model(dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"must agree on \['ranks'\]"):
        save_trtllm(model, tmp_path / "out", tp=1 + world.rank, group=world)
    assert not (tmp_path / "out").exists()


def test_a_disk_that_fills_leaves_nothing(tmp_path):
    seen, real = [], disk.write

    def full(*arguments):
        seen.append(1)
        if len(seen) == 5:
            raise OSError(28, "No space left on device")
        return real(*arguments)

    with patch.object(disk, "write", full), pytest.raises(OSError, match="No space left"):
        save_trtllm(tiny_model(dtype=torch.bfloat16), tmp_path / "out", tp=2)
    assert not list(tmp_path.iterdir())


KILLED = """
import os, signal, sys
import torch
from megablocks_core.export import save_trtllm
from megablocks_core.files import disk
from tests.export.tiny_models import tiny_model
real, seen = disk.write, []
def killed(*arguments):
    seen.append(1)
    if len(seen) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments)
disk.write = killed
save_trtllm(tiny_model(dtype=torch.bfloat16), sys.argv[1], tp=2)
"""


@pytest.mark.drill
@pytest.mark.parametrize("at", [1, 4, 9])
def test_a_kill_leaves_nothing_that_looks_whole(tmp_path, at):
    (tmp_path / "to").mkdir()
    command = [sys.executable, "-c", KILLED, tmp_path / "to" / "out", str(at)]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    assert subprocess.run(command, env=environment, timeout=120).returncode == -signal.SIGKILL
    left = list((tmp_path / "to").iterdir())
    assert left and all(is_unfinished(path) for path in left), left
    save_trtllm(tiny_model(dtype=torch.bfloat16), tmp_path / "to" / "out", tp=2)
    verify(tmp_path / "to" / "out")


def test_needs_neither_tensorrt_llm_nor_transformers(tmp_path):
    pretrained(tmp_path / "in")
    code = f"""
import sys
sys.modules["tensorrt_llm"] = sys.modules["transformers"] = None
from megablocks_core.export import load_hf, save_trtllm, verify
from megablocks_core.layers import Decoder, DecoderSpec
model = Decoder(DecoderSpec.from_hf({str(tmp_path / "in")!r}), device="meta")
load_hf(model, {str(tmp_path / "in")!r})
save_trtllm(model, {str(tmp_path / "out")!r}, tp=2)
verify({str(tmp_path / "out")!r}, values=True)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
