"""A training checkpoint of any layout becomes the folder that save_hf writes of the model."""

import json
import shutil
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file

from megablocks_core import ckpt
from megablocks_core.auto import checkpoint_to_hf, decoder_from_hf
from megablocks_core.ckpt.tools.converting import convert
from megablocks_core.export import save_hf, verify
from megablocks_core.export.drafting import FolderDraft
from megablocks_core.groups import Mesh
from megablocks_core.testing import ranks
from tests.auto.runs import (
    CONFIGS,
    TOKENS,
    config_of,
    contents,
    decoder_of,
    is_first,
    save,
    trained,
)
from tests.ckpt.tools.saves import quiet_save
from tests.ckpt.tools.test_megatron import made

LAYOUTS = [{"tp": 2, "ep": 2}, {"fsdp": True}, {"zero": 1}, {"tp": 2, "zero": 2}]


@pytest.mark.parametrize("family", list(CONFIGS))
@ranks(1, 4)
def test_every_layout_gives_the_bytes_of_save_hf_and_transformers_logits(tmp_path, family):
    world = Mesh().group("dp")
    layouts = LAYOUTS if world.size > 1 else [{}]
    for number, layout in enumerate(layouts):
        model, optimizer, average = trained(family, layout)
        save(tmp_path / f"{number}", model, optimizer, average, group=world)
        save_hf(model, tmp_path / f"{number}-hf", group=world, max_file_bytes=50_000)
        with torch.no_grad():
            logits = model(TOKENS, gather_logits=True).logits
        if is_first():
            out = tmp_path / f"{number}-out"
            checkpoint_to_hf(tmp_path / f"{number}", out, max_file_bytes=50_000)
            verify(out, values=True)
            assert contents(out) == contents(tmp_path / f"{number}-hf")
            assert len(contents(out)) > 3
            theirs = transformers.AutoModelForCausalLM.from_pretrained(
                out, experts_implementation="eager"
            )
            assert theirs.dtype == torch.float64
            with torch.no_grad():
                expected = theirs(TOKENS).logits
            assert (logits - expected).norm() <= 2e-6 * expected.norm()
        if world.size > 1:
            dist.barrier()


def test_dtype_and_companions_and_another_config(tmp_path):
    save(tmp_path / "run", *trained("mixtral", {}))
    like = tmp_path / "like"
    like.mkdir()
    (like / "config.json").write_text(json.dumps({**config_of("mixtral"), "eos_token_id": 7}))
    (like / "tokenizer.json").write_text("{}")
    (like / "notes.txt").write_text("mine")
    seen = []
    checkpoint_to_hf(
        tmp_path / "run",
        tmp_path / "out",
        like=like,
        dtype=torch.bfloat16,
        progress=lambda *how_far: seen.append(how_far),
    )
    assert set(contents(tmp_path / "out")) == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["eos_token_id"], config["dtype"]) == (7, "bfloat16")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    assert seen == sorted(seen) and len({total for _, total in seen}) == 1
    assert len(seen) >= 2 * len(written) and seen[-1][0] == seen[-1][1] > 0
    other = tmp_path / "config.json"
    other.write_text(json.dumps({**config_of("mixtral"), "eos_token_id": 9}))
    checkpoint_to_hf(tmp_path / "run", tmp_path / "more", config=other, like=like)
    config = json.loads((tmp_path / "more" / "config.json").read_text())
    assert (config["eos_token_id"], config["dtype"]) == (9, "float64")


@ranks(2)
def test_an_average_is_written_in_the_dtype_of_the_weights(tmp_path):
    """With what has no average: frozen weights, and buffers."""
    model, optimizer, average = trained("nemotron_h", {"tp": 2}, steps=3, dtype=torch.bfloat16)
    save(tmp_path / "run", model, optimizer, average)
    world = Mesh().group("dp")
    save_hf(model, tmp_path / "model", group=world)
    with average.swap():
        save_hf(model, tmp_path / "swapped", group=world)
    if is_first():
        checkpoint_to_hf(tmp_path / "run", tmp_path / "out", entry="average")
        assert contents(tmp_path / "out") == contents(tmp_path / "swapped")
        assert contents(tmp_path / "out") != contents(tmp_path / "model")
    dist.barrier()


def test_torchs_own_checkpoints_of_our_models_and_of_transformers(tmp_path):
    """A tied head, which torch saves under both names, is written once."""
    model, optimizer, average = trained("llama", {})
    save_hf(model, tmp_path / "hf")
    save(tmp_path / "ours", model, optimizer, average)
    convert(tmp_path / "ours", tmp_path / "dcp")
    config = tmp_path / "hf" / "config.json"
    checkpoint_to_hf(tmp_path / "dcp", tmp_path / "1", like=tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    weights = dict(theirs.state_dict())
    assert "lm_head.weight" in weights
    quiet_save({"model": weights}, tmp_path / "theirs")
    checkpoint_to_hf(tmp_path / "theirs", tmp_path / "2", config=config)
    for number in (1, 2):
        assert contents(tmp_path / f"{number}") == contents(tmp_path / "hf")
    quiet_save(
        {"model": {**weights, "lm_head.weight": torch.ones(30, 32).double()}}, tmp_path / "3"
    )
    with pytest.raises(ValueError, match="lm_head.weight and model.embed_tokens.weight are tied"):
        checkpoint_to_hf(tmp_path / "3", tmp_path / "out", config=config)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_megatrons_checkpoints(tmp_path, family):
    """As through ckpt's ``convert``, whose logits are compared with Megatron's own."""
    _, config = made(tmp_path, family)
    convert(tmp_path / "theirs", tmp_path / "ours", config=config)
    for number, source in enumerate(("theirs", "ours")):
        checkpoint_to_hf(tmp_path / source, tmp_path / f"{number}", config=config)
    verify(tmp_path / "0")
    assert contents(tmp_path / "0") == contents(tmp_path / "1")
    written = load_file(tmp_path / "0" / "model.safetensors")
    converted = load_file(tmp_path / "ours" / "model.safetensors")
    assert len(written) > 20 and written["lm_head.weight"].shape == (30, 32)
    assert written.keys() == converted.keys()
    assert all(torch.equal(converted[name], one) for name, one in written.items())


def test_what_does_not_fit_is_named_and_nothing_is_written(tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    model = decoder_of("mixtral")
    spec = model.spec.to_hf()
    ckpt.save(run, {"model": model, "step": 1})
    config = tmp_path / "config.json"

    def refused(message, *, config=config, **options):
        with pytest.raises(ValueError, match=message):
            checkpoint_to_hf(run, out, config=config, **options)
        assert not out.exists()

    refused("run has no config.json beside its tensors: config must be", config=None)
    refused("config.json is missing")
    config.write_text(json.dumps({**spec, "num_local_experts": 5, "num_hidden_layers": 1}))
    refused(r"missing \['model.layers.0.block_sparse_moe.experts.4.w1.weight.*not described")
    config.write_text(json.dumps({**spec, "intermediate_size": 41}))
    refused(r"w1.weight has shape \(40, 32\), described as \(41, 32\)")
    config.write_text(json.dumps({**spec, "model_type": "t5"}))
    refused("model_type='t5' must be one of llama")
    config.write_text(json.dumps(spec))
    for entry in ("step", "ema"):
        refused(rf"entry='{entry}' must be the weights of a model.*\['model'\]", entry=entry)
    out.mkdir()
    (out / "mine").touch()
    with pytest.raises(ValueError, match="must be new or an empty folder"):
        checkpoint_to_hf(run, out, config=config)
    shutil.rmtree(out)
    with torch.no_grad():
        model.get_parameter("model.norm.weight")[:2] = torch.nan
        model.get_parameter("lm_head.weight")[3, 5] = torch.inf
    ckpt.save(tmp_path / "nan", {"model": model})
    with (
        patch.object(FolderDraft, "open", side_effect=AssertionError("a folder was begun")),
        pytest.raises(ValueError, match=r"finite, but are not in lm_head\.weight, model\.norm\."),
    ):
        checkpoint_to_hf(tmp_path / "nan", out, config=config)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["LATEST", "config.json", "nan", "run"]
    checkpoint_to_hf(tmp_path / "nan", out, config=config, allow_nonfinite=True)
    written = load_file(out / "model.safetensors")
    assert torch.equal(written["model.norm.weight"].isnan().nonzero()[:, 0], torch.arange(2))


def test_damage_is_found_and_nothing_is_written(tmp_path):
    save(tmp_path / "run", *trained("llama", {}))
    path = tmp_path / "run" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(ckpt.CheckpointError, match="damaged"):
        checkpoint_to_hf(tmp_path / "run", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LATEST", "run"]


def test_the_folder_opens_as_a_decoder(tmp_path):
    model, *rest = trained("granitemoehybrid", {})
    save(tmp_path / "run", model, *rest)
    checkpoint_to_hf(tmp_path / "run", tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(decoder_from_hf(tmp_path / "out")(TOKENS).logits, model(TOKENS).logits)
