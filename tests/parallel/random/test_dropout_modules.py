"""A model of other code whose dropouts were replaced drops as one process, however it is cut."""

import copy
import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close
from transformers import Phi3Config, Phi3ForCausalLM

from megablocks_core.groups import LOCAL, Group
from megablocks_core.parallel import (
    DropoutKey,
    dropout,
    dropout_modules,
    gather,
    recompute_modules,
    tensor_parallelize,
)
from megablocks_core.parallel.random.dropout_modules import DropoutOfModel, refuse_other_dropouts
from megablocks_core.testing import assert_parallel_equivalence, ranks
from tests.parallel.tiny_models import make_exact, tiny_model

F64 = torch.float64
TOKENS = torch.arange(32).view(4, 8) * 7 % 101
INDEX = DropoutKey(5, 9).index(torch.tensor([[11], [3], [40], [7]]), torch.arange(8))
PLAN = {"0": "column", "2": "column", "3": "row", "4": "whole"}


def _phi():
    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.3,
        resid_pdrop=0.1,
        pad_token_id=0,
    )
    model = Phi3ForCausalLM(config).double().train()
    make_exact(model)
    return model


def _mlp():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 24), nn.GELU(), nn.Dropout(0.3), nn.Linear(24, 8), nn.Dropout(0.1)
    ).double()


@ranks(1, 2, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_transformers_model_equals_one_process(sequence_parallel):
    def build(group):
        model = _phi()
        dropout_modules(model)
        tensor_parallelize(model, group=group, sequence_parallel=sequence_parallel)
        return model

    assert_parallel_equivalence(
        build,
        {"input_ids": TOKENS, "dropout_index": INDEX},
        group=Group.of(dist.group.WORLD),
        loss=lambda output: output.logits.sin().sum(),
        same_start=True,
    )


@ranks(1, 2, 4)
def test_cut_features_equal_one_process():
    def build(group):
        model = _mlp()
        dropout_modules(model)
        tensor_parallelize(model, PLAN, group=group)
        return model

    assert_parallel_equivalence(
        lambda group: _Called(build(group)),
        torch.randn(4, 8, 8),
        group=Group.of(dist.group.WORLD),
        loss=lambda y: (y.sin() * torch.arange(8)).sum(),
        same_start=True,
    )


def test_each_dropout_has_its_path_as_stream():
    model, x = _mlp(), torch.randn(4, 8, 8, dtype=F64)
    plain = copy.deepcopy(model)
    assert dropout_modules(model) == ("2", "4")
    hidden = dropout(plain[:2](x), 0.3, stream="2", index=INDEX)
    expected = dropout(plain[3](hidden), 0.1, stream="4", index=INDEX)
    assert torch.equal(model(x, dropout_index=INDEX), expected)
    assert torch.equal(model.eval()(x), plain.eval()(x))
    assert torch.equal(model(x, dropout_index=INDEX), plain(x))
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_a_model_in_evaluation_stays_there_and_one_without_dropout_is_left_alone():
    model = _mlp().eval()
    dropout_modules(model)
    assert not any(part.training for part in model.modules())
    plain = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0))
    assert dropout_modules(plain) == ()
    assert not plain._forward_pre_hooks


def test_parts_in_evaluation_stay_there():
    model = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))
    model[1].eval()
    dropout_modules(model)
    assert model[0].training and not any(part.training for part in model[1].modules())


def test_a_dropout_of_two_names_drops_by_counter_under_both():
    drop, layer = nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.2))
    model = nn.Sequential(drop, layer, drop, layer)
    assert dropout_modules(model) == ("0", "1.0", "2")
    assert {type(model[0]), type(model[2]), type(layer[0])} == {DropoutOfModel}
    assert model[1] is model[3]
    x = torch.ones(4, 8, 8)
    assert torch.equal(model(x, dropout_index=INDEX), model(x, dropout_index=INDEX))


def test_micro_batches_equal_one_batch():
    model, gradients = _phi(), []
    dropout_modules(model)
    for rows in ([[0, 1, 2, 3]], [[2, 0], [3], [1]]):
        model.zero_grad()
        for own in rows:
            logits = model(input_ids=TOKENS[own], dropout_index=INDEX[own], use_cache=False).logits
            logits.sin().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert_close(*gradients, rtol=1e-10, atol=1e-10)


def test_training_without_words_raises_and_words_last_for_one_call():
    model, x = _mlp(), torch.randn(4, 8, 8, dtype=F64)
    dropout_modules(model)
    model(x, dropout_index=INDEX)
    with pytest.raises(ValueError, match="dropout_index=None .* because '2' drops"):
        model(x)
    with pytest.raises(ValueError, match="index of shape"):
        model(x, dropout_index=INDEX[:2])
    with pytest.raises(ValueError, match="dropout_index=None"):
        model(x)


def test_f_101_regions_that_run_again_drop_alike():
    """Also where another micro-batch went forward in between."""
    gradients = []
    for again in (False, True):
        model = _phi()
        dropout_modules(model)
        if again:
            recompute_modules(model, "layers.*")
        losses = [
            model(input_ids=TOKENS[own], dropout_index=INDEX[own], use_cache=False)
            .logits.sin()
            .sum()
            for own in ([0, 1], [2, 3])
        ]
        for loss in losses:
            loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert_close(*gradients, rtol=0, atol=0)


def test_other_checkpoints_raise_instead_of_dropping_otherwise():
    model = _phi()
    dropout_modules(model)
    model.activation_checkpointing_enable({"use_reentrant": False})
    loss = model(input_ids=TOKENS, dropout_index=INDEX, use_cache=False).logits.sum()
    with pytest.raises(ValueError, match="dropout_index=None"):
        loss.backward()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_drop_alike_and_by_their_own_calls(copied):
    model, x = _mlp(), torch.randn(4, 8, 8, dtype=F64)
    dropout_modules(model)
    twin = copied(model)
    assert torch.equal(twin(x, dropout_index=INDEX), model(x, dropout_index=INDEX))
    assert twin[2].words is not model[2].words
    assert twin[2].words is twin[4].words


@ranks(2)
def test_gather_leaves_dropouts_of_one_process():
    model, x = _mlp(), torch.randn(4, 8, 8, dtype=F64)
    dropout_modules(model)
    expected = model(x, dropout_index=INDEX)
    tensor_parallelize(model, PLAN, group=Group.of(dist.group.WORLD))
    assert model[2].cuts_features and model[2].group.size == 2 and not model[4].cuts_features
    gather(model)
    assert model[2].group is LOCAL and not model[2].cuts_features
    assert torch.equal(model(x, dropout_index=INDEX), expected)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"0": "column", "3": "row"}, r"plan\['2'\]=None must say whose features"),
        ({**PLAN, "2": "row"}, r"plan\['2'\]=Row"),
        ({**PLAN, "4": "replicated"}, r"plan\['4'\]=Replicated"),
    ],
)
def test_dropouts_beside_cuts_must_be_planned(plan, message):
    model = _mlp()
    dropout_modules(model)
    with pytest.raises(ValueError, match=message):
        tensor_parallelize(model, plan, group=LOCAL)


def test_dropouts_that_cannot_be_replaced_are_refused_by_name():
    for model, name in (
        (tiny_model("llama", attention_dropout=0.1), "self_attn.attention_dropout=0.1"),
        (nn.MultiheadAttention(8, 2, dropout=0.2), "dropout=0.2"),
        (nn.Sequential(nn.Dropout2d(0.5)), "0.p=0.5"),
    ):
        with pytest.raises(ValueError, match=f"{name} must be 0"):
            dropout_modules(model)
    model = _mlp()
    with pytest.raises(ValueError, match="2.p=0.3 must be 0.*dropout_modules replaces"):
        refuse_other_dropouts(model)
    dropout_modules(model)
    refuse_other_dropouts(model)
    assert sum(isinstance(part, DropoutOfModel) for part in model) == 2


def test_it_compiles_whole():
    model, x = _mlp(), torch.randn(4, 8, 8, dtype=F64)
    dropout_modules(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    results = []
    for call in (compiled, model):
        model.zero_grad()
        y = call(x, dropout_index=INDEX)
        y.square().sum().backward()
        results.append([y, *(parameter.grad for parameter in model.parameters())])
    assert_close(*results)


class _Called(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.run = partial(model, dropout_index=INDEX)
        self.model = model

    def forward(self, x):
        return self.run(x)
