"""Each rank's tensors are those that are cut out of whole ones by hand."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from megablocks_core.export import save_trtllm, verify
from megablocks_core.export.lazies import lazy
from megablocks_core.export.trtllm.mapping import Mapping
from megablocks_core.export.trtllm.model import Model, model_of
from megablocks_core.export.trtllm.scales import Scales
from megablocks_core.export.trtllm.tensors import padded_vocab, tensors
from tests.export.logical_model import written
from tests.export.trtllm.plain import FAMILIES, SIZES, ranks_of

MAPPINGS = [{}, {"tp": 2}, {"tp": 4}, {"pp": 2}, {"tp": 2, "pp": 3}]
MOE_MAPPINGS = [*MAPPINGS, {"tp": 2, "moe_ep": 2}, {"tp": 4, "moe_ep": 2}, {"tp": 4, "moe_ep": 4}]
CASES = [
    (family, mapping)
    for family in FAMILIES
    for mapping in (MOE_MAPPINGS if family in ("mixtral", "qwen3_moe") else MAPPINGS)
]


def saved(folder, family, options, dtype=torch.bfloat16):
    """A transformers model, and the tensors of its folder."""
    torch.manual_seed(2)
    config = transformers.AutoConfig.for_model(family, **options)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return model, written(folder)


def files_of(folder, count):
    assert len(list(folder.glob("rank*.safetensors"))) == count
    return [load_file(folder / f"rank{rank}.safetensors") for rank in range(count)]


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(("family", "mapping"), CASES)
def test_slices_are_those_cut_by_hand(tmp_path, family, mapping):
    options = FAMILIES[family]
    model, whole = saved(tmp_path / "in", family, options)
    save_trtllm(model, tmp_path / "out", **mapping)
    expected = ranks_of(family, options, whole, **mapping)
    found = files_of(tmp_path / "out", len(expected))
    for one, other in zip(found, expected, strict=True):
        assert_equal(one, other)
    verify(tmp_path / "out", values=True)


def test_sixteen_ranks(tmp_path):
    """The reference mixes ranks up from eleven on."""
    options = {**SIZES, "num_attention_heads": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    options |= {"hidden_size": 16, "head_dim": 2}
    model, whole = saved(tmp_path / "in", "llama", options)
    save_trtllm(model, tmp_path / "out", tp=16)
    expected = ranks_of("llama", options, whole, tp=16)
    for one, other in zip(files_of(tmp_path / "out", 16), expected, strict=True):
        assert_equal(one, other)


def some(vocab):
    words = {**SIZES, "model_type": "llama", "vocab_size": vocab, "num_hidden_layers": 0}
    table = torch.randn(vocab, 16, generator=torch.Generator().manual_seed(vocab))
    whole = {
        "model.embed_tokens.weight": lazy(table, "F32"),
        "model.norm.weight": lazy(torch.ones(16), "F32"),
        "lm_head.weight": lazy(table - 2 * table.mean(), "F32"),
    }
    return model_of(words), whole


def heads_of(model: Model, whole, tp):
    return [
        piece.value[...]
        for place in Mapping(tp).places
        for piece in tensors(model, whole, place, torch.float32, Scales())
        if piece.name == "lm_head.weight"
    ]


@pytest.mark.parametrize(("vocab", "tp", "rows"), [(131, 4, 132), (32001, 2, 32002), (9, 8, 16)])
def test_f_178_padded_ids_never_win(vocab, tp, rows):
    model, whole = some(vocab)
    assert padded_vocab(model, tp) == rows
    heads = heads_of(model, whole, tp)
    assert [len(head) for head in heads] == [rows // tp] * tp
    head = torch.cat(heads)
    real = whole["lm_head.weight"][...]
    assert torch.equal(head[:vocab], real)
    low = torch.linalg.lstsq(real[:9], -torch.ones(9)).solution
    # Random ones; those that a token is likeliest for; one whose logits are below 0.
    hidden = torch.randn(200, 16, generator=torch.Generator().manual_seed(1))
    hidden = torch.cat([hidden, real[:100], -real[:100], low[None]])
    logits = hidden @ head.T
    assert (logits.argmax(1) < vocab).all()
    assert (logits[:, vocab:] < logits[:, :vocab].amax(1, keepdim=True) - 1e-3)[:-1].all()
    wanted = logits[:, : min(16, vocab)].mean(1, keepdim=True)
    torch.testing.assert_close(logits[:, vocab:], wanted.expand(-1, rows - vocab))


def test_f_178_the_config_says_the_real_size_and_the_padded_one(tmp_path):
    model, _ = saved(tmp_path / "in", "llama", {**SIZES, "vocab_size": 131})
    save_trtllm(model, tmp_path / "out", tp=4)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["vocab_size"], config["vocab_size_padded"]) == (131, 132)
    for found in files_of(tmp_path / "out", 4):
        assert found["lm_head.weight"].shape == (33, 16)
        assert found["transformer.vocab_embedding.weight"].shape == (33, 16)


@pytest.mark.parametrize("tp", [1, 2])
def test_f_181_experts_are_up_then_gate_and_are_not_turned(tmp_path, tp):
    options = {**SIZES, "num_local_experts": 2, "num_hidden_layers": 1}
    model, _ = saved(tmp_path / "in", "mixtral", options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate_up_proj"):
                parameter[:, :24], parameter[:, 24:] = 1, 2
    save_trtllm(model, tmp_path / "out", tp=tp)
    for found in files_of(tmp_path / "out", tp):
        fc = found["transformer.layers.0.mlp.fc.weight"]
        assert fc.shape == (2, 48 // tp, 16)
        assert (fc[:, : 24 // tp] == 2).all() and (fc[:, 24 // tp :] == 1).all()
        assert found["transformer.layers.0.mlp.proj.weight"].shape == (2, 16, 24 // tp)
        assert found["transformer.layers.0.mlp.router.weight"].dtype == torch.float32
