"""A vocabulary grows and shrinks as one process's does, and new rows follow from the seed."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

from megablocks_core.groups import Mesh, gather_whole, marks
from megablocks_core.layers import Decoder, DecoderSpec
from megablocks_core.parallel import (
    ColumnParallelLinear,
    VocabParallelEmbedding,
    add_lora,
    reset_parameters,
    resize_vocab,
)
from megablocks_core.testing import ranks

SIZES = [(10, 12), (10, 13), (13, 5), (5, 1), (1, 9), (10, 10)]


def _spec(vocab_size, tied=False, **options):
    sizes = {"hidden_size": 8, "ffn_size": 8, "num_layers": 1, "num_heads": 4, "num_kv_heads": 4}
    return DecoderSpec(vocab_size, **sizes, head_dim=2, tied=tied, **options)


def _decoder(vocab_size, *, tied=False, mesh=None, dtype=torch.float32, seed=3):
    decoder = Decoder(_spec(vocab_size, tied), mesh=mesh, dtype=dtype)
    decoder.reset_parameters(seed)
    return decoder


class _Tables(nn.Module):
    def __init__(self, length, group, tied):
        super().__init__()
        self.embed = VocabParallelEmbedding(length, 4, padding_idx=0, group=group)
        self.head = ColumnParallelLinear(4, length, uneven=True, group=group)
        reset_parameters(self, seed=1)
        assert self.head.bias is not None
        nn.init.ones_(self.head.bias)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids))


@ranks(1, 2, 4)
def test_rows_stay_go_and_come_at_any_cut():
    group = Mesh(tp=dist.get_world_size()).group("tp")
    for before, after in SIZES:
        for tied in (False, True):
            _assert_resized(before, after, tied, group)


def _assert_resized(before, after, tied, group):
    model = _Tables(before, group, tied)
    model.embed.weight.requires_grad_(False)
    old = {name: tensor.clone() for name, tensor in gather_whole(model).items()}
    resize_vocab(model, after, seed=7, std=0.5, tables=("embed", "head"))
    new, kept = gather_whole(model), min(before, after)
    for name, tensor in new.items():
        assert len(tensor) == after and torch.equal(tensor[:kept], old[name][:kept]), name
    assert (new["head.bias"][kept:] == 0).all()
    assert not model.embed.weight.requires_grad and model.head.bias.requires_grad
    assert (model.head.weight is model.embed.weight) == tied
    fresh = new["embed.weight"][kept:]
    assert torch.equal(new["head.weight"][kept:], fresh) == (tied or after <= before)
    if after > before:
        assert 0.2 < fresh.std() < 0.8
    assert gather_whole(model).keys() == dict(model.named_parameters(remove_duplicate=False)).keys()
    assert torch.equal(model.embed(torch.arange(after)), new["embed.weight"])
    logits = model(torch.arange(after))
    assert logits.shape == (after, model.head.spec.held_length(after))
    with pytest.raises(ValueError, match="ids must lie between"):
        model(torch.tensor([after]))


@ranks(1, 2, 4)
@pytest.mark.parametrize("tied", [False, True])
def test_a_grown_decoder_is_one_that_was_built_so(tied):
    dtype = torch.bfloat16 if tied else torch.float64
    mesh = Mesh(tp=dist.get_world_size())
    decoder = _decoder(10, tied=tied, mesh=mesh, dtype=dtype)
    resize_vocab(decoder, 13, seed=3)
    expected = _decoder(13, tied=tied, dtype=dtype)
    assert decoder.spec == expected.spec
    whole = gather_whole(decoder)
    assert whole.keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(whole[name], tensor), name
    tokens = torch.arange(13)
    loss = decoder(tokens, gather_logits=True).logits.float().square().mean()
    loss.backward()
    decoder.to_empty(device="cpu").reset_parameters(3)
    assert (
        torch.equal(gather_whole(decoder)["model.embed_tokens.weight"], whole["lm_head.weight"])
        == tied
    )


@ranks(2, 4)
def test_f_167_rows_of_the_whole_are_never_multiplied_by_the_ranks():
    size = dist.get_world_size()
    decoder = _decoder(12, mesh=Mesh(tp=size))
    for rows in (10, 12):
        resize_vocab(decoder, rows, seed=3)
    assert decoder.model.embed_tokens.weight.shape == (12 // size, 8)
    assert decoder.lm_head.weight.shape == (12 // size, 8)
    assert decoder.spec.vocab_size == 12
    for name, tensor in gather_whole(decoder).items():
        assert "embed" not in name and "head" not in name or tensor.shape == (12, 8)
    logits = decoder(torch.arange(12), gather_logits=True).logits
    assert logits.shape == (12, 12)


def test_a_model_on_meta_and_one_of_another_library():
    decoder = Decoder(_spec(10), device="meta")
    resize_vocab(decoder, 12, seed=0)
    assert all(parameter.is_meta for parameter in decoder.parameters())
    assert decoder.lm_head.weight.shape == (12, 8)
    config = transformers.LlamaConfig(
        vocab_size=10,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    resize_vocab(model, 12, seed=0)
    assert model.config.vocab_size == 12 and model(torch.tensor([[11]])).logits.shape[-1] == 12
    assert model.lm_head.weight is model.model.embed_tokens.weight


@ranks(2)
def test_ranks_that_call_for_different_things_all_raise():
    group = Mesh(tp=2).group("tp")
    decoder = _decoder(10, mesh=Mesh(tp=2))
    before = gather_whole(decoder)
    with pytest.raises(ValueError, match="must be alike on all ranks"):
        resize_vocab(decoder, 12 + group.rank, seed=0)
    with pytest.raises(ValueError, match="must be a positive whole number"):
        resize_vocab(decoder, 12 * (1 - group.rank), seed=0)
    after = gather_whole(decoder)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_what_is_not_served_is_named_and_nothing_changes():
    padded = Decoder(_spec(10, pad_token_id=9))
    adapted = _decoder(10)
    add_lora(adapted, ["lm_head"], rank=2, alpha=2)
    uneven = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 5)})
    foreign = nn.ModuleDict({"embed": type("Scaled", (nn.Embedding,), {})(4, 2)})
    tables = ("embed", "head")
    for model, rows, options, message in (
        (_decoder(10), 0, {}, "rows=0 must be a positive whole number"),
        (_decoder(10), 4.0, {}, "rows=4.0 must be a positive whole number"),
        (_decoder(10), 4, {"tables": ("wte",)}, r"tables=\('wte',\) must name layers of the Dec"),
        (padded, 9, {}, "rows=9 must be above padding_idx=9 of model.embed_tokens"),
        (adapted, 12, {}, "lm_head must have no adapter"),
        (uneven, 6, {"tables": tables, "std": 1.0}, "head of 5 rows .* must be as embed, of 4"),
        (foreign, 6, {"tables": tables, "std": 1.0}, "embed is a Scaled and must be one of"),
        (uneven, 6, {"tables": ("embed",)}, "std=None must be a number"),
    ):
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ValueError, match=message):
            resize_vocab(model, rows, seed=0, **options)
        after = model.state_dict()
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    model = nn.ModuleDict({"embed": nn.Embedding(4, 2)})
    model.config = SimpleNamespace(initializer_range=0.1, vocab_size=4)
    resize_vocab(model, 6, seed=0, tables=("embed",))
    assert model.config.vocab_size == 6 and [*marks(model)][0][1].shape == (6, 2)
