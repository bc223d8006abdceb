"""A model is described alike for every exporter, and ranks that ask for other things are told."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megablocks_core.export import load_hf, save_hf
from megablocks_core.export.described import described, target_of
from megablocks_core.export.ours import Ours
from megablocks_core.groups import LOCAL, Mesh
from megablocks_core.layers import Decoder, DecoderSpec
from megablocks_core.testing import ranks
from tests.export.references import tiny
from tests.export.tiny_models import assert_same, pretrained, tiny_model


@ranks(1, 2, 4)
def test_every_tensor_of_the_folder_comes_from_any_layout(tmp_path):
    reference = pretrained(tmp_path / "in")
    world = Mesh().group("dp")
    decoder = Decoder(DecoderSpec.from_hf(tmp_path / "in"), mesh=Mesh(tp=world.size))
    load_hf(decoder, tmp_path / "in")
    found = described(decoder, group=world, task="test", agreed={}, dtype=torch.bfloat16)
    wanted = reference.state_dict()
    assert {whole.name for whole in found.wholes} == found.made.keys() == wanted.keys()
    assert {whole.dtype for whole in found.wholes} == {torch.bfloat16}
    seen = {}
    boxes = [
        (name, found.ours.needs(made, tuple(slice(0, size) for size in wanted[name].shape)))
        for name, made in found.made.items()
    ]
    found.collection.visit(
        dict.fromkeys(range(world.size), boxes),
        lambda name, values: seen.update({name: _whole(found.ours, found.made[name], values)}),
    )
    for name, tensor in wanted.items():
        assert torch.equal(seen[name], tensor), name
    assert found.config["model_type"] == "llama" and "dtype" not in found.config


def _whole(ours: Ours, made, values):
    box = tuple(slice(0, size) for size in made.get_shape())
    return ours.values(made, box, values).clone()


def test_a_config_is_a_copy_and_names_no_quantisation(tmp_path):
    model = tiny_model("qwen3")
    model.config.quantization_config = {"quant_method": "fp8"}
    config = described(model, group=LOCAL, task="test", agreed={}, vocab_size=9).config
    assert config["vocab_size"] == 9 and "quantization_config" not in config
    assert model.config.vocab_size == 10
    with pytest.raises(ValueError, match="like=None must be a folder"):
        described(torch.nn.Linear(2, 2), group=LOCAL, task="test", agreed={})
    with pytest.raises(ValueError, match="model=1 must be a module"):
        target_of(1, tmp_path, group=LOCAL, task="test")


@ranks(2)
def test_ranks_that_ask_for_other_things_are_told_which(tmp_path):
    world = Mesh().group("dp")
    with pytest.raises(ValueError, match=r"agree on \['tp'\]"):
        described(tiny_model(), group=world, task="test", agreed={"tp": world.rank, "pp": 1})


@ranks(1, 2, 3)
def test_tied_tensors_that_ranks_hold_apart_are_written_once(tmp_path):
    """Stages of a pipeline: the table on the first, a copy of it as the head on the last."""
    world = Mesh().group("dp")
    reference = pretrained(tmp_path / "in", family="qwen3")
    model = _stage(reference, world.rank, world.size)
    save_hf(model, tmp_path / "out", group=world)
    dist.barrier()
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), reference)
    if world.rank == world.size - 1:
        with torch.no_grad():
            model.lm_head.weight[9, 15] += 1
    message = r"lm_head\.weight and model\.embed_tokens\.weight, which are tied, but differ"
    with pytest.raises(ValueError, match=message):
        save_hf(model, tmp_path / "other", group=world)
    if world.rank == world.size - 1:
        model.lm_head.weight = torch.nn.Parameter(torch.zeros(9, 16))
    with pytest.raises(ValueError, match=message):
        save_hf(model, tmp_path / "other", group=world)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@ranks(2)
def test_stages_leave_out_the_rows_that_pad_a_vocabulary(tmp_path, family):
    world = Mesh().group("dp")
    reference = pretrained(tmp_path / "in", family=family)
    model = _stage(reference, world.rank, world.size)
    save_hf(model, tmp_path / "out", group=world, vocab_size=9)
    dist.barrier()
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    table = reference.get_input_embeddings().weight
    assert torch.equal(tensors["model.embed_tokens.weight"], table[:9])
    assert ("lm_head.weight" in tensors) == (family == "llama")


@ranks(2)
def test_stages_of_stacked_experts_are_written_one_by_one(tmp_path):
    world = Mesh().group("dp")
    reference = tiny("mixtral", torch.float32)
    save_hf(_stage(reference, world.rank, world.size), tmp_path / "out", group=world)
    dist.barrier()
    again = tiny("mixtral", torch.float32)
    for parameter in again.parameters():
        parameter.data.zero_()
    load_hf(again, tmp_path / "out")
    assert_same(again.state_dict(), reference)


def _stage(reference, stage, stages) -> Any:
    """Some layers of a model, and what comes before the first or behind the last."""
    model = torch.nn.Module()
    model.config = reference.config
    for name, tensor in reference.state_dict().items():
        *path, last = name.split(".")
        number = int(path[2]) if path[1:2] == ["layers"] else 0 if "embed" in name else 9
        if min(number, stages - 1) != stage:
            continue
        owner = model
        for part in path:
            if part not in dict(owner.named_children()):
                owner.add_module(part, torch.nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(last, torch.nn.Parameter(tensor.clone()))
    return model
