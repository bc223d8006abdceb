"""Folders are written bit for bit at any layout, whole or not at all."""

import json
import subprocess
import sys
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import nn

from megablocks_core.export import drafting, load_hf, save_hf, slabs, verify
from megablocks_core.groups import Mesh, collect, gather_whole
from megablocks_core.layers import Decoder, DecoderSpec
from megablocks_core.testing import ranks
from tests.export.live_bytes import LiveBytes
from tests.export.tiny_models import FAMILIES, TOKENS, assert_same, pretrained, tiny_model


@ranks(2, 4)
def test_ranks_write_the_files_in_turn(tmp_path):
    """What every rank holds is sent to none; a disk that fills ends all, and leaves nothing."""
    pretrained(tmp_path / "in")
    world = Mesh().group("dp")
    decoder = Decoder(DecoderSpec.from_hf(tmp_path / "in"))
    load_hf(decoder, tmp_path / "in", group=world)
    own, write = [], drafting.SafetensorsWriter

    def noted(path, *args, **options):
        own.append(path.name)
        return write(path, *args, **options)

    with patch.object(drafting, "SafetensorsWriter", noted), patch.object(dist, "send", None):
        save_hf(decoder, tmp_path / "out", group=world, max_file_bytes=3000)
    files = sorted(path.name for path in (tmp_path / "out").glob("model-*.safetensors"))
    assert own == files[world.rank :: world.size] and len(files) > 4
    save_hf(decoder, tmp_path / f"alone-{world.rank}", max_file_bytes=3000)
    for path in (tmp_path / "out").iterdir():
        assert path.read_bytes() == (tmp_path / f"alone-{world.rank}" / path.name).read_bytes()

    def full(path, *args, **options):
        if world.rank == 1:
            raise OSError(28, "No space left on device")
        return write(path, *args, **options)

    kind, message = (OSError, "No space") if world.rank == 1 else (RuntimeError, "failed on rank 1")
    with patch.object(drafting, "SafetensorsWriter", full), pytest.raises(kind, match=message):
        save_hf(decoder, tmp_path / "full", group=world, max_file_bytes=3000)
    world.all_gather_object(None)
    assert not [path for path in tmp_path.iterdir() if "full" in path.name]


@ranks(4)
def test_every_layout_writes_the_same_bytes_in_many_files(tmp_path):
    pretrained(tmp_path / "in")
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
        assert_same(again.state_dict(), tiny_model())
    dist.barrier()
    sharded = Decoder(DecoderSpec.from_hf(tmp_path / "in"), mesh=Mesh(tp=2))
    load_hf(sharded, tmp_path / "4", group=Mesh().group("dp"))
    assert_same(gather_whole(sharded), tiny_model())


def test_dtypes(tmp_path):
    pretrained(tmp_path / "in", dtype=torch.bfloat16)
    decoder = Decoder(DecoderSpec.from_hf(tmp_path / "in"), dtype=torch.float64)
    load_hf(decoder, tmp_path / "in")
    save_hf(decoder, tmp_path / "out", dtype=torch.bfloat16)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for tensor in written.values())
    assert_same(written, tiny_model(dtype=torch.bfloat16))
    with torch.no_grad():
        decoder.get_parameter("model.norm.weight")[0] = 1e6
    with pytest.raises(ValueError, match="infinite in model.norm.weight as torch.float16"):
        save_hf(decoder, tmp_path / "half", dtype=torch.float16)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_like_gives_config_and_tokenizer_files(tmp_path):
    reference = pretrained(tmp_path / "in", eos_token_id=7)
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
    model = tiny_model("qwen3")
    save_hf(model, tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)


def test_what_the_config_does_not_describe_is_not_written(tmp_path):
    pretrained(tmp_path / "other", intermediate_size=28, mlp_bias=False)
    with pytest.raises(ValueError) as caught:
        save_hf(tiny_model(), tmp_path / "out", like=tmp_path / "other")
    for part in (
        "not described ['model.layers.0.mlp.gate_proj.bias'",
        "model.layers.1.mlp.up_proj.weight has shape (24, 16), described as (28, 16)",
    ):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match="model_type='opt' must be one of llama"):
        config = json.loads((tmp_path / "other" / "config.json").read_text())
        (tmp_path / "other" / "config.json").write_text(json.dumps({**config, "model_type": "opt"}))
        save_hf(tiny_model(), tmp_path / "out", like=tmp_path / "other")
    with pytest.raises(ValueError, match="the model has no spec or config"):
        save_hf(nn.Linear(1, 1), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_interrupted_export_leaves_nothing(tmp_path, monkeypatch):
    model = tiny_model()
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


def test_needs_no_transformers(tmp_path):
    pretrained(tmp_path / "in")
    code = f"""
import sys
sys.modules["transformers"] = None
from megablocks_core.export import drafting, load_hf, save_hf, verify
from megablocks_core.layers import Decoder, DecoderSpec
model = Decoder(DecoderSpec.from_hf({str(tmp_path / "in")!r}), device="meta")
load_hf(model, {str(tmp_path / "in")!r})
save_hf(model, {str(tmp_path / "out")!r})
verify({str(tmp_path / "out")!r})
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), tiny_model())


@pytest.mark.parametrize("family", list(FAMILIES))
@ranks(1, 2, 4)
def test_f_166_f_175_round_trip_is_bit_exact_and_logits_are_equal(tmp_path, family):
    mesh = Mesh(tp=dist.get_world_size())
    world = mesh.group("tp")
    reference = pretrained(tmp_path / "in", family)
    decoder = Decoder(DecoderSpec.from_hf(tmp_path / "in"), mesh=mesh)
    load_hf(decoder, tmp_path / "in", group=world)
    assert_same(gather_whole(decoder), reference)

    save_hf(decoder, tmp_path / "out", group=world)
    if world.rank == 0:
        verify(tmp_path / "out")
        written = load_file(tmp_path / "out" / "model.safetensors")
        assert ("lm_head.weight" in written) == (family == "llama")
        assert written["model.embed_tokens.weight"].shape[0] == 10
        assert_same(written, reference)
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert again.dtype == torch.float32
        assert torch.equal(again(TOKENS).logits, reference(TOKENS).logits)
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@ranks(1, 2)
def test_values_that_are_not_finite_are_named_before_anything_is_written(tmp_path, value):
    pretrained(tmp_path / "in")
    mesh = Mesh(tp=dist.get_world_size())
    world = mesh.group("tp")
    decoder = Decoder(DecoderSpec.from_hf(tmp_path / "in"), mesh=mesh)
    load_hf(decoder, tmp_path / "in", group=world)
    if world.rank == world.size - 1:
        with torch.no_grad():
            decoder.get_parameter("model.layers.1.mlp.up_proj.weight")[3, 5] = value
    with pytest.raises(ValueError, match=r"finite, but are not in model\.layers\.1\.mlp\.up_proj"):
        save_hf(decoder, tmp_path / "out", group=world)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    world.all_gather_object(None)
    save_hf(decoder, tmp_path / "out", group=world, allow_nonfinite=True)
    again = Decoder(DecoderSpec.from_hf(tmp_path / "in"), mesh=mesh)
    world.all_gather_object(None)
    with pytest.raises(ValueError, match=r"not finite, in \['model\.layers\.1\.mlp\.up_proj"):
        load_hf(again, tmp_path / "out", group=world)
    load_hf(again, tmp_path / "out", group=world, allow_nonfinite=True)
    for one, other in zip(again.parameters(), decoder.parameters(), strict=True):
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))


@pytest.mark.parametrize("family", ["llama", "granitemoehybrid"])
@ranks(1, 2)
def test_saving_holds_a_few_slabs_however_large_a_tensor_is(tmp_path, monkeypatch, family):
    """Files stack all experts of a layer, or a table is cut by rows and matrices by columns."""
    mesh = Mesh(tp=dist.get_world_size())
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 2048, "hidden_size": 64, "intermediate_size": 256}
    if family == "granitemoehybrid":
        sizes |= {"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 32}
        sizes |= {"layer_types": ["attention"], "position_embedding_type": "rope"}
    config = transformers.AutoConfig.for_model(family, **sizes)
    decoder = Decoder(DecoderSpec.from_hf(config), mesh=mesh)
    monkeypatch.setattr(slabs, "SLAB_BYTES", 4096)
    monkeypatch.setattr(collect, "ROUND_BYTES", 16384)
    with LiveBytes(*decoder.parameters(), *decoder.buffers()) as live:
        save_hf(decoder, tmp_path / "out", group=mesh.group("tp"), max_file_bytes=300_000)
    largest = max(tensor.nbytes for tensor in gather_whole(decoder).values())
    assert largest >= 400_000
    # A round, and what one slab is received, joined, converted and laid out in; or nothing at all.
    assert live.peak <= 16384 + 6 * 4096, live.peak
    assert (live.peak == 0) == (family == "llama" and mesh.size("tp") == 1)
    if mesh.group("tp").rank == 0:
        verify(tmp_path / "out", values=True)
