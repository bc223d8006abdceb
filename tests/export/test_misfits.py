"""What does not fit is named, from both sides, on all ranks, before anything is changed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megablocks_core.auto import decoder_from_hf
from megablocks_core.export import load_hf, save_hf
from megablocks_core.groups import LOCAL, Mesh, gather_whole
from megablocks_core.layers import Decoder, DecoderSpec
from megablocks_core.testing import ranks
from tests.export.references import tiny


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Folders that transformers wrote in float32, by family."""
    made = tmp_path_factory.mktemp("folders")
    for family in ("llama", "qwen3", "qwen3_moe", "nemotron_h"):
        tiny(family, torch.float32).save_pretrained(made / family)
    return made


@pytest.mark.parametrize("family", ["qwen3", "nemotron_h"])
@ranks(1, 2)
def test_a_decoder_has_the_device_and_dtype_that_are_asked_for(folders, family):
    mesh = Mesh(tp=dist.get_world_size())
    narrow = decoder_from_hf(folders / family, mesh=mesh, dtype=torch.bfloat16)
    with torch.device("meta"):  # what the caller builds there is no reason to hold nothing
        wide = decoder_from_hf(folders / family, mesh=mesh, device="cpu")
    wide_whole, narrow_whole = gather_whole(wide), gather_whole(narrow)
    assert all(tensor.device.type == "cpu" for tensor in wide.state_dict().values())
    for name, parameter in narrow.named_parameters():
        kept = name.endswith((".A_log", ".D", ".dt_bias"))  # decays are float32 always
        assert parameter.dtype == (torch.float32 if kept else torch.bfloat16), name
    for name, tensor in tiny(family, torch.float32).state_dict().items():
        ours = name.replace("backbone.", "model.").replace("embeddings.", "embed_tokens.")
        if ours in wide_whole:
            assert torch.equal(wide_whole[ours], tensor), name
            assert torch.equal(narrow_whole[ours], tensor.to(narrow_whole[ours].dtype)), name


def test_meta_is_no_place_for_values(folders):
    decoder = Decoder(DecoderSpec.from_hf(folders / "llama"), device="meta")
    for load in (
        lambda: load_hf(decoder, folders / "llama", device="meta"),
        lambda: decoder_from_hf(folders / "llama", device="meta"),
    ):
        with pytest.raises(ValueError, match=r"device=device\(type='meta'\) must have memory"):
            load()
    with torch.device("meta"), pytest.raises(ValueError, match="must have memory"):
        decoder_from_hf(folders / "llama")


# A change of the spec that a folder has, and what is said of either side.
MISFITS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "one more layer": (
        "llama",
        {"num_layers": 3},
        ["the folder lacks ['model.layers.2.", "'model.layers.2.mlp.up_proj.weight'"],
    ),
    "one layer less": (
        "llama",
        {"num_layers": 1},
        ["the model lacks ['model.layers.1.input_layernorm.weight'"],
    ),
    "wider": (
        "llama",
        {"ffn_size": 48},
        [
            "model.layers.0.mlp.up_proj.weight has shape (48, 32), on disk (40, 32)",
            "model.layers.1.mlp.down_proj.weight has shape (32, 48), on disk (32, 40)",
        ],
    ),
    "another vocabulary": (
        "llama",
        {"vocab_size": 53},
        [
            "model.embed_tokens.weight has shape (53, 32), on disk (51, 32)",
            "lm_head.weight has shape (53, 32), on disk (51, 32)",
        ],
    ),
    "biases": (
        "llama",
        {"mlp_bias": True},
        ["the folder lacks ['model.layers.0.mlp.gate_proj.bias'"],
    ),
    "no norms of heads": (
        "qwen3",
        {"qk_norm": False, "family": "llama"},
        ["the model lacks ['model.layers.0.self_attn.k_norm.weight'"],
    ),
    "a tied head": ("llama", {"tied": True}, ["are tied, but differ on disk"]),
    "fewer experts": (
        "qwen3_moe",
        {"num_experts": 4},
        ["the model lacks ['model.layers.1.mlp.experts.4.down_proj.weight'"],
    ),
    "more experts": (
        "qwen3_moe",
        {"num_experts": 12},
        ["the folder lacks ['model.layers.1.mlp.experts.8."],
    ),
    "another width of experts": (
        "nemotron_h",
        {"shared_ffn_size": 24},
        ["shared_experts.up_proj.weight has shape (24, 32), on disk (16, 32)"],
    ),
}


@pytest.mark.parametrize("misfit", MISFITS)
@ranks(2)
def test_a_spec_that_differs_from_the_folders_is_told_on_all_ranks(folders, misfit):
    """Where it differs on all ranks, and where it does on the last alone."""
    family, change, parts = MISFITS[misfit]
    own = DecoderSpec.from_hf(folders / family)
    other = replace(own, **change) if "family" in change or own.moe is None else _moe(own, change)
    for differing in ([0, 1], [1]):
        spec = other if dist.get_rank() in differing else own
        for device in ("cpu", "meta"):
            decoder = Decoder(spec, mesh=Mesh(tp=2, ep=2), device=device)
            before = _values(decoder)
            with pytest.raises(ValueError) as caught:
                load_hf(decoder, folders / family, group=Mesh().group("dp"))
            message = str(caught.value)
            assert str(folders / family) in message
            for part in parts:
                assert part in message, message
            assert _values(decoder) == before


@ranks(2)
def test_models_that_differ_between_ranks_are_not_written(folders, tmp_path):
    mesh, world, rank = Mesh(tp=2), Mesh().group("dp"), dist.get_rank()
    own = DecoderSpec.from_hf(folders / "llama")
    for number, (spec, dtype, part) in enumerate(
        [
            (own, torch.bfloat16, "ranks disagree on"),
            (replace(own, ffn_size=44), torch.float32, "ranks disagree on"),
            (replace(own, num_layers=1), torch.float32, "model.layers.1."),
        ]
    ):
        spec, dtype = (spec, dtype) if rank == 1 else (own, torch.float32)
        decoder = Decoder(spec, mesh=mesh, dtype=dtype)
        with pytest.raises(ValueError, match=part):
            save_hf(decoder, tmp_path / f"{number}", group=world)
        dist.barrier()
        assert not (tmp_path / f"{number}").exists()


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@ranks(2)
def test_a_group_that_lacks_ranks_of_the_model_writes_nothing(folders, tmp_path, family):
    sizes = {"tp": 2} if family == "llama" else {"ep": 2}
    decoder = decoder_from_hf(folders / family, mesh=Mesh(**sizes))
    rank = dist.get_rank()
    part = "must include the ranks" if family == "llama" else "missing"
    with pytest.raises(ValueError, match=part):
        save_hf(decoder, tmp_path / f"{rank}", group=LOCAL)
    assert not (tmp_path / f"{rank}").exists()


@ranks(2)
def test_a_rank_that_cannot_read_a_folder_stops_all(folders, tmp_path):
    decoder = Decoder(DecoderSpec.from_hf(folders / "llama"), mesh=Mesh(tp=2))
    before, rank = _values(decoder), dist.get_rank()
    path = folders / "llama" if rank == 0 else tmp_path / "nowhere"
    with pytest.raises((ValueError, OSError), match="nowhere"):
        load_hf(decoder, path, group=Mesh().group("dp"))
    assert _values(decoder) == before
    with pytest.raises((ValueError, OSError), match="nowhere"):
        like = {} if rank == 0 else {"like": tmp_path / "nowhere"}
        save_hf(decoder, tmp_path / "out", group=Mesh().group("dp"), **like)
    dist.barrier()
    assert not Path(tmp_path / "out").exists()


def _moe(spec: DecoderSpec, change: dict[str, Any]) -> DecoderSpec:
    assert spec.moe is not None
    return replace(spec, moe=replace(spec.moe, **change))


def _values(module: nn.Module) -> dict[str, Any]:
    return {
        name: ("meta", tensor.shape) if tensor.is_meta else tensor.tolist()
        for name, tensor in module.state_dict().items()
    }
