"""Models with experts: checkpoints of any layout, names, and tokens that do not divide.

That they equal transformers' at every layout stands in tests/export/test_layouts.py.
"""

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.nn import functional as F

from megablocks_core import ckpt
from megablocks_core.export import load_hf, verify
from megablocks_core.groups import Mesh, gather_whole, marks, own_slices
from megablocks_core.layers import Decoder, DecoderSpec, MoESpec, hybrid
from megablocks_core.testing import ranks

F64 = torch.float64
TOKENS = torch.arange(28).view(4, 7) * 7 % 97
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "head_dim": 8},
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
        "head_dim": 16,
    },
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 1.5},
}


def _theirs(family):
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    for parameter in model.parameters():  # Far from the initial values, where all is linear.
        nn.init.normal_(parameter, std=0.3)
    return model


def _folder(tmp_path, family):
    folder = tmp_path / family
    if not dist.is_initialized() or dist.get_rank() == 0:
        _theirs(family).save_pretrained(folder)
    if dist.is_initialized():
        dist.barrier()
    return folder


@ranks(4, timeout=300)
def test_a_checkpoint_of_one_layout_loads_in_others(tmp_path):
    """Saved at ep 2 with AdamW's state; loaded at ep 1, ep 4 and tp 2 with ep 2."""
    spec, world = DecoderSpec.from_hf(_theirs("qwen3_moe").config), Mesh().group("dp")
    torch.manual_seed(3)
    saved = _trained(Decoder(spec, mesh=Mesh(ep=2), dtype=F64))
    ckpt.save(tmp_path / "step", saved, group=world)
    whole = gather_whole(saved["model"])
    for sizes in ({}, {"ep": 4}, {"tp": 2, "ep": 2}):
        loaded = _trained(Decoder(spec, mesh=Mesh(**sizes), dtype=F64))
        ckpt.load(tmp_path / "step", loaded, group=world)
        for name, value in gather_whole(loaded["model"]).items():
            assert torch.equal(value, whole[name]), name
        moments = loaded["optimizer"].state[loaded["model"].get_parameter(STACK)]["exp_avg"]
        there = saved["optimizer"].state[saved["model"].get_parameter(STACK)]["exp_avg"]
        experts = loaded["model"].get_submodule(STACK.rpartition(".")[0])
        rows = torch.cat(Mesh(ep=2).expert.group("ep").all_gather(there))
        assert torch.equal(moments, rows[experts.experts])


STACK = "model.layers.1.mlp.experts.up_proj"


def _trained(decoder):
    """The state after one step on gradients that are functions of the values."""
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-2)
    for parameter in decoder.parameters():
        parameter.grad = parameter.detach().sin()
    optimizer.step()
    return {"model": decoder, "optimizer": optimizer}


def test_experts_that_are_missing_or_misshapen_are_named(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = _folder(tmp_path, "mixtral")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    block = "model.layers.1.block_sparse_moe.experts"
    lacking = {**tensors, f"{block}.4.w1.weight": torch.ones(2)}
    del lacking[f"{block}.2.w3.weight"]
    lacking[f"{block}.3.w2.weight"] = torch.ones(32, 39)
    save_file(lacking, path)
    decoder = Decoder(DecoderSpec.from_hf(folder))
    before = {name: value.clone() for name, value in decoder.state_dict().items()}
    with pytest.raises(ValueError) as caught:
        load_hf(decoder, folder)
    for part in (
        "the folder lacks ['model.layers.1.mlp.experts.2.up_proj.weight']",
        f"the model lacks ['{block}.4.w1.weight']",
        "model.layers.1.mlp.experts.3.down_proj.weight has shape (32, 40), on disk (32, 39)",
    ):
        assert part in str(caught.value)
    for name, value in decoder.state_dict().items():
        assert torch.equal(value, before[name])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_local_experts": 5}))
    with pytest.raises(ValueError, match=r"missing \['model.layers.0.block_sparse_moe.experts.4"):
        verify(folder)


def test_biases_on_choices_begin_at_zero():
    moe = MoESpec(4, 2, 8, score="sigmoid", selection_bias=True)
    sizes = {"hidden_size": 16, "num_heads": 2, "moe": moe}
    decoder = Decoder(hybrid(50, "*E", **sizes))
    bias = decoder.get_buffer("model.layers.1.mixer.gate.e_score_correction_bias")
    torch.testing.assert_close(bias, torch.zeros(4))
    bias.fill_(1)
    decoder.reset_parameters()
    assert not bias.any()


def test_one_expert_is_a_stack_of_one(tmp_path):
    options = {**FAMILIES["mixtral"], "num_local_experts": 1, "num_experts_per_tok": 1}
    config = transformers.AutoConfig.for_model("mixtral", **SIZES, **options)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "in")
    decoder = Decoder(DecoderSpec.from_hf(tmp_path / "in"))
    load_hf(decoder, tmp_path / "in")
    torch.testing.assert_close(decoder(TOKENS).logits, model(TOKENS).logits)


@ranks(2)
def test_tokens_that_do_not_divide_over_ranks_are_padded_and_not_counted(tmp_path):
    """Seven tokens on two ranks: the eighth goes to no expert, and counts in no loss."""
    torch.manual_seed(0)
    spec = DecoderSpec.from_hf(_theirs("olmoe").config)
    torch.manual_seed(0)
    whole = Decoder(spec, dtype=F64)
    torch.manual_seed(0)
    mesh = Mesh(tp=2, ep=2)
    cut = Decoder(spec, mesh=mesh, sequence_parallel=True, dtype=F64)
    ours, theirs = cut(TOKENS), whole(TOKENS)
    for name, losses in theirs.losses.items():
        for (a, count), (b, expected) in zip(ours.losses[name], losses, strict=True):
            torch.testing.assert_close(a, b)
            assert count == expected == 28
    load = torch.stack(list(ours.tokens_per_expert))
    assert torch.equal(
        mesh.group("tp").all_reduce(load), torch.stack(list(theirs.tokens_per_expert))
    )
    for output in (ours, theirs):
        losses = [total / count for each in output.losses.values() for total, count in each]
        torch.stack(losses).sum().backward()
    for name, parameter, specs in marks(cut):
        expected = whole.get_parameter(name).grad
        if expected is not None:
            for theirs_, mine in own_slices(specs, tuple(expected.shape)):
                torch.testing.assert_close(parameter.grad[mine], expected[theirs_], msg=name)
    assert F.softmax(ours.logits, -1).isfinite().all()
