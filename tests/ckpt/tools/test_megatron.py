"""Weights that Megatron saved give transformers' models the logits of Megatron's own."""

import json
import math
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from megablocks_core import ckpt
from megablocks_core.ckpt.places.places import place_of
from megablocks_core.ckpt.tools.checkpoint import read_whole
from megablocks_core.ckpt.tools.command import main
from megablocks_core.ckpt.tools.converting import convert
from megablocks_core.ckpt.tools.dcp_reading import DcpFolder
from megablocks_core.ckpt.tools.megatron import MegatronCheckpoint, is_megatron
from tests.ckpt.tools.megatron_save import (
    EXPERTS,
    FORMS,
    GROUPS,
    HEADS,
    HIDDEN,
    LAYERS,
    TOKENS,
    VOCAB,
)
from tests.ckpt.tools.saves import quiet_save, save_dcp, trained

FAMILIES = ["llama", "qwen2", "qwen3", "mixtral", "qwen3_moe"]
LAYOUTS = [(1, 1, 1), (2, 1, 1), (2, 2, 1), (1, 1, 2), (1, 2, 2)]
MARK = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}


def config_of(family, **changes):
    sizes = {
        "model_type": family,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": HIDDEN // HEADS,
        "vocab_size": VOCAB,
        "intermediate_size": 48,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
    }
    if family == "mixtral":
        sizes |= {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "intermediate_size": 24}
    if family == "qwen3_moe":
        sizes |= {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        sizes["norm_topk_prob"] = True
    return {**sizes, **changes}


def write_config(folder, family, **changes):
    path = folder / f"{family}.json"
    path.write_text(json.dumps(config_of(family, **changes)))
    return path


@pytest.fixture(scope="module", params=LAYOUTS)
def theirs(request, tmp_path_factory):
    """A folder of Megatron's checkpoints, written at a layout (tp, pp, ep)."""
    pytest.importorskip("megatron.core.dist_checkpointing", reason="oracle megatron")
    folder = tmp_path_factory.mktemp("megatron")
    script = Path(__file__).with_name("megatron_save.py")
    layout = ",".join(map(str, request.param))
    runs = [
        subprocess.Popen(
            [sys.executable, script, folder, str(rank), layout, *FAMILIES],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(math.prod(request.param))
    ]
    for run in runs:
        out, _ = run.communicate(timeout=300)
        assert run.returncode == 0, out.decode()[-2000:]
    return folder


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_gives_megatrons_logits(theirs, tmp_path, family, form):
    transformers = import_module("transformers")
    config = write_config(tmp_path, family)
    (said,) = convert(theirs / f"{family}-{form}", tmp_path / "ours", config=config)
    assert said.startswith("left out ") and said.endswith(" keys that hold no weights")
    ckpt.verify(tmp_path / "ours")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        logits = model(TOKENS).logits
    expected = torch.load(theirs / f"{family}.logits", weights_only=True)
    assert expected.std() > 0.1, "logits that say nothing"
    assert (logits - expected).norm() < 2e-6 * 10 * expected.norm()


def test_a_box_of_any_tensor_is_the_same_as_its_part_of_the_whole(tmp_path):
    opened = MegatronCheckpoint(*made(tmp_path, "mixtral"))
    for name, held in opened.tensors.items():
        whole = read_whole(opened, name)
        box = tuple(slice(size // 3, size) for size in held.shape)
        assert torch.equal(opened.read(name, box), whole[box]), name
    assert opened.beside().keys() == {"config.json"}


def made(folder, family, **changes):
    """A DCP folder with Megatron's keys and shapes, every value another, and its config."""
    keys = {
        "embedding.word_embeddings.weight": (32, HIDDEN),
        "output_layer.weight": (32, HIDDEN),
        "decoder.final_layernorm.weight": (HIDDEN,),
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (LAYERS, HIDDEN),
        "decoder.layers.self_attention.linear_qkv.weight": (LAYERS, 64, HIDDEN),
        "decoder.layers.self_attention.linear_proj.weight": (LAYERS, HIDDEN, HIDDEN),
    }
    if family == "mixtral":
        keys |= {
            "decoder.layers.pre_mlp_layernorm.weight": (LAYERS, HIDDEN),
            "decoder.layers.mlp.router.weight": (LAYERS, EXPERTS, HIDDEN),
            "decoder.layers.mlp.experts.experts.linear_fc1.weight": (LAYERS, EXPERTS, 48, HIDDEN),
            "decoder.layers.mlp.experts.experts.linear_fc2.weight": (LAYERS, EXPERTS, HIDDEN, 24),
        }
    else:
        keys |= {
            "decoder.layers.mlp.linear_fc1.layer_norm_weight": (LAYERS, HIDDEN),
            "decoder.layers.mlp.linear_fc1.weight": (LAYERS, 96, HIDDEN),
            "decoder.layers.mlp.linear_fc2.weight": (LAYERS, HIDDEN, 48),
        }
    state, first = {}, 0
    for key, shape in keys.items():
        count = torch.Size(shape).numel()
        state[key] = torch.arange(first, first + count, dtype=torch.float64).reshape(shape)
        first += count
    quiet_save({**state, "common_state/shard_0_1": {"args": 1}, **changes}, folder / "theirs")
    (folder / "theirs" / "metadata.json").write_text(json.dumps(MARK))
    return DcpFolder(place_of(folder / "theirs")), write_config(folder, family)


def test_rows_are_where_megatron_has_them(tmp_path):
    """By hand: 4 query heads and 2 key/value heads of 8 rows make 2 groups of 2 + 1 + 1."""
    folder, config = made(tmp_path, "llama")
    opened = MegatronCheckpoint(folder, config)
    box = tuple(slice(0, size) for size in (LAYERS, 64, HIDDEN))
    qkv = folder.read("decoder.layers.self_attention.linear_qkv.weight", box)[1]
    parts = {
        "q": [qkv[0:16], qkv[32:48]],
        "k": [qkv[16:24], qkv[48:56]],
        "v": [qkv[24:32], qkv[56:64]],
    }
    for name, rows in parts.items():
        found = read_whole(opened, f"model/model.layers.1.self_attn.{name}_proj.weight")
        assert torch.equal(found, torch.cat(rows))
    assert opened.tensors["model/lm_head.weight"].shape == (VOCAB, HIDDEN)
    assert opened.left_out == 1


def test_what_does_not_map_is_named(tmp_path):
    for number, (changes, message) in enumerate(
        [
            ({"decoder.layers.mlp.odd.weight": torch.ones(2, 2)}, "decoder.layers.mlp.odd.weight"),
            ({"vision.x": torch.ones(2)}, "1 keys have no place .*: vision.x"),
            ({"args": 3}, "objects that are no weights: args"),
        ]
    ):
        (tmp_path / str(number)).mkdir()
        folder, config = made(tmp_path / str(number), "llama", **changes)
        with pytest.raises(ValueError, match=message):
            MegatronCheckpoint(folder, config)


def test_optimizer_state_is_left_out(tmp_path):
    name = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight"
    opened = MegatronCheckpoint(*made(tmp_path, "llama", **{name: torch.ones(2, 2)}))
    assert opened.left_out == 2


def test_the_mark_and_the_config_are_checked(tmp_path):
    folder, config = made(tmp_path, "llama")
    mark = tmp_path / "theirs" / "metadata.json"
    assert is_megatron(folder)
    for text in ("{", "[]", "{}"):
        mark.write_text(text)
        with pytest.raises(ckpt.CheckpointError, match="names no sharded_backend"):
            is_megatron(folder)
    mark.write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(ValueError, match="'zarr', which must be 'torch_dist'"):
        is_megatron(folder)
    save_dcp(tmp_path / "torch", *trained())
    assert not is_megatron(DcpFolder(place_of(tmp_path / "torch")))
    for text, message in (("{", "is not JSON"), ("[]", "must be a JSON object")):
        config.write_text(text)
        with pytest.raises(ValueError, match=message):
            MegatronCheckpoint(folder, config)


def test_the_command_asks_for_a_config(tmp_path, capsys):
    _, config = made(tmp_path, "llama")
    source, target = str(tmp_path / "theirs"), str(tmp_path / "ours")
    assert main(["convert", source, target]) == 2
    assert "config must be the model's config.json" in capsys.readouterr().err
    assert main(["convert", source, target, "--config", str(config)]) == 0
    assert "left out 1 keys" in capsys.readouterr().err
    assert main(["convert", source, target + "2", "--config", str(tmp_path / "none")]) == 1
