"""A model is described alike for every exporter, and ranks that ask for other things are told."""

import pytest
import torch

from megablocks_core.export import load_hf
from megablocks_core.export.described import described, target_of
from megablocks_core.export.ours import Ours
from megablocks_core.groups import LOCAL, Mesh
from megablocks_core.layers import Decoder, DecoderSpec
from megablocks_core.testing import ranks
from tests.export.tiny_models import pretrained, tiny_model


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
