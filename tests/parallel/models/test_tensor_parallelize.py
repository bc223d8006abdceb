"""A model cut in place computes what it did before: outputs, losses, gradients, norms, steps."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing import assert_close

from megablocks_core.groups import (
    Group,
    gather_from,
    load_whole,
    marks,
    scatter_to,
)
from megablocks_core.parallel import Column, gather, tensor_parallelize
from megablocks_core.testing import assert_parallel_equivalence, ranks
from tests.parallel.tiny_models import GROUPED_PLAN, Grouped, tiny_model

_TOKENS = torch.arange(16).view(2, 8) * 7 % 101


def _world() -> Group:
    return Group.of(dist.group.WORLD)


def _loss(output):
    weights = torch.linspace(-1, 1, output.logits.numel(), dtype=output.logits.dtype)
    return (output.logits.reshape(-1) * weights).sum() + output.logits.square().mean()


@ranks(1, 2, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "mixtral"])
def test_transformers_models_equal_one_process(kind, sequence_parallel):
    def build(group):
        model = tiny_model(kind, tied=kind == "gemma3")
        tensor_parallelize(model, group=group, sequence_parallel=sequence_parallel)
        return model

    assert_parallel_equivalence(
        build, {"input_ids": _TOKENS}, group=_world(), loss=_loss, same_start=True
    )


@ranks(2)
@pytest.mark.parametrize("kind", ["llama", "gemma3", "mixtral"])
def test_gather_restores_the_model(kind):
    torch.manual_seed(0)
    whole, cut = (tiny_model(kind, num_key_value_heads=1, tied=kind == "gemma3") for _ in range(2))
    cut.load_state_dict(whole.state_dict())
    attributes = _attributes(cut)
    tensor_parallelize(cut, group=_world(), sequence_parallel=True)
    assert _attributes(cut) != attributes
    gather(cut)

    assert str(cut) == str(whole)
    assert _attributes(cut) == attributes
    for name, tensor in whole.state_dict().items():
        assert torch.equal(cut.state_dict()[name], tensor), name
    assert all(not specs for _, _, specs in marks(cut))
    assert torch.equal(cut(input_ids=_TOKENS).logits, whole(input_ids=_TOKENS).logits)
    assert (cut.lm_head.weight is cut.model.embed_tokens.weight) == (kind == "gemma3")


def _attributes(model):
    """What each module holds, and its hooks, but for marks and a flag of transformers' own."""
    beside = {"_shard_marks", "_is_hf_initialized"}
    return {
        name: (set(vars(part)) - beside, len(part._forward_hooks), len(part._forward_pre_hooks))
        for name, part in model.named_modules()
    }


@ranks(2)
def test_a_model_on_meta_is_cut_there_and_filled_later():
    group = _world()
    torch.manual_seed(0)
    whole = tiny_model("qwen3", num_key_value_heads=1)
    with torch.device("meta"):
        cut = tiny_model("qwen3", num_key_value_heads=1)
    tensor_parallelize(cut, group=group)
    assert all(parameter.is_meta for parameter in cut.parameters())
    cut.to_empty(device="cpu")
    load_whole(cut, whole.state_dict())
    for ours, theirs in zip(cut.buffers(), whole.buffers(), strict=True):
        ours.copy_(theirs)  # rotary tables, which no checkpoint holds
    assert_close(cut(input_ids=_TOKENS).logits, whole(input_ids=_TOKENS).logits, atol=1e-10, rtol=0)


@ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_decoder_layer_sends_two_messages_each_way(sequence_parallel):
    """Two all-reduces each way; or two gathers and two reduce-scatters; norms share a message."""
    group = _world()
    counts = []
    for layers in (1, 2):
        torch.manual_seed(0)
        model = tiny_model("llama", num_hidden_layers=layers, attention_bias=False, mlp_bias=False)
        tensor_parallelize(model, group=group, sequence_parallel=sequence_parallel)
        with CommDebugMode() as forward:
            logits = model(input_ids=_TOKENS).logits
        with CommDebugMode() as backward:
            logits.sum().backward()
        counts.append((forward.get_total_counts(), backward.get_total_counts()))
    (forward_1, backward_1), (forward_2, backward_2) = counts
    expected = (4, 5) if sequence_parallel else (2, 2)
    assert (forward_2 - forward_1, backward_2 - backward_1) == expected


@ranks(2)
def test_copies_of_a_cut_model_compute_alike():
    torch.manual_seed(0)
    model = tiny_model("gemma3", num_key_value_heads=1, tied=True, exact=False)
    tensor_parallelize(model, group=_world(), sequence_parallel=True)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.model.norm.weight.add_(1.0)  # the copy must not see this
    unlike = model(input_ids=_TOKENS).logits
    model.model.norm.weight.data.sub_(1.0)
    assert torch.equal(twin(input_ids=_TOKENS).logits, model(input_ids=_TOKENS).logits)
    assert not torch.equal(twin(input_ids=_TOKENS).logits, unlike)


@ranks(2)
def test_parts_are_cut_once_and_gathered_with_their_model():
    group = _world()
    model = nn.ModuleDict({"a": Grouped(), "b": Grouped()})
    state = copy.deepcopy(model.state_dict())
    for part in model.values():
        tensor_parallelize(part, GROUPED_PLAN, group=group)
    for again in (model, model["a"]):
        with pytest.raises(ValueError, match="cut already, whole or in part"):
            tensor_parallelize(again, {}, group=group)
    gather(model)
    assert_close(model.state_dict(), state, rtol=0, atol=0)

    tensor_parallelize(
        model, {f"*.{name}": kind for name, kind in GROUPED_PLAN.items()}, group=group
    )
    with pytest.raises(ValueError, match="gather the model that was cut, not a Grouped in it"):
        gather(model["a"])
    gather(model)
    gather(model)  # of a whole model changes nothing
    assert_close(model.state_dict(), state, rtol=0, atol=0)


@ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradient_checkpointing_equals_one_process_or_is_refused(sequence_parallel):
    def build(group):
        model = tiny_model("qwen3").train()
        tensor_parallelize(model, group=group, sequence_parallel=sequence_parallel)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    assert_parallel_equivalence(
        build, {"input_ids": _TOKENS}, group=_world(), loss=_loss, same_start=True
    )
    model = build(_world())
    model.gradient_checkpointing_enable({"use_reentrant": True})
    if sequence_parallel:
        with pytest.raises(ValueError, match="use_reentrant=True must be False"):
            model(input_ids=_TOKENS)
        model.eval()(input_ids=_TOKENS)


@ranks(2)
@pytest.mark.parametrize("flag", ["output_hidden_states", "output_router_logits"])
def test_outputs_of_own_tokens_alone_are_refused(flag):
    model = tiny_model("mixtral")
    tensor_parallelize(model, group=_world(), sequence_parallel=True)
    with pytest.raises(ValueError, match=f"{flag}=True must not be set under sequence"):
        model(input_ids=_TOKENS, **{flag: True})
    setattr(model.config, flag, True)
    with pytest.raises(ValueError, match=f"{flag}=True must not be set under sequence"):
        model(input_ids=_TOKENS)
    model(input_ids=_TOKENS, **{flag: False})


class _Plain(nn.Module):
    """A model that nobody's plan knows: packed projection, per-head scale, norm on own heads."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(13, 16)
        self.packed = nn.Linear(16, 3 * 16)
        self.scale = nn.Parameter(torch.ones(4))
        self.head_norm = nn.LayerNorm(4)
        self.out = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.classes = nn.Linear(16, 7)

    def forward(self, ids):
        x = self.embedding(ids)
        q, k, v = self.packed(x).unflatten(-1, (3, -1, 4)).unbind(-3)
        y = self.head_norm(q * k) * v * self.scale[:, None]
        x = x + self.out(y.flatten(-2))
        return self.classes(x + self.down(torch.relu(self.up(self.norm(x)))))


_PLAIN_PLAN = {
    "embedding": "vocab",
    "packed": Column(unit=4, segments=(16, 16, 16)),
    "scale": "heads",
    "head_norm": "replicated",
    "out": "row",
    "norm": "whole",
    "up": "column",
    "down": "row",
    "classes": "column_gather",
}


@ranks(1, 2, 4)
@pytest.mark.parametrize("optimizer", ["adamw", "foreach"])
def test_any_model_is_cut_by_a_plan_in_words(optimizer):
    def build(group):
        model = _Plain()
        tensor_parallelize(model, _PLAIN_PLAN, group=group)
        return model

    assert_parallel_equivalence(
        build,
        torch.arange(12).view(2, 6),
        group=_world(),
        loss=lambda y: y.square().sum(),
        optimizer=None if optimizer == "adamw" else partial(torch.optim.AdamW, foreach=True),
    )


@ranks(2)
def test_the_report_names_every_parameter():
    report = tensor_parallelize(_Plain(), _PLAIN_PLAN, group=_world())
    assert set(report.cut) >= {"embedding.weight", "packed.bias", "scale", "out.weight"}
    assert report.summed == ("head_norm.weight", "head_norm.bias")
    assert set(report.whole) == {"norm.weight", "norm.bias", "out.bias", "down.bias"}
    names = {name for name, _ in _Plain().named_parameters()}
    assert {*report.cut, *report.summed, *report.whole} == names


@ranks(2)
@pytest.mark.parametrize("tokens", [4, 6])
def test_a_sequential_model_whose_tokens_the_caller_cuts(tokens):
    group = _world()

    def build(group):
        model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        tensor_parallelize(model, {"1": "column", "3": "row"}, group=group, sequence_parallel=True)
        return model

    def own(x):
        return scatter_to(x, dim=-2, group=group)

    def whole(y):
        return gather_from(y, dim=-2, group=group)

    x = torch.randn(tokens, 8, generator=torch.Generator().manual_seed(0))
    assert_parallel_equivalence(
        build, x, group=group, loss=lambda y: y.square().sum(), split=own, join=whole
    )


@ranks(2)
def test_sequences_that_do_not_divide_raise():
    model = tiny_model("llama")
    tensor_parallelize(model, group=_world(), sequence_parallel=True)
    with pytest.raises(ValueError, match="a sequence of 7 tokens must divide evenly"):
        model(input_ids=_TOKENS[:, :7])
    # The parameters are seen again after a forward that raised.
    assert all("weight" not in vars(part) for part in model.modules())


@ranks(2)
@pytest.mark.parametrize("wrong", [-1, 101])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_an_id_outside_the_vocabulary_raises_on_every_rank(kind, wrong):
    model = tiny_model(kind)
    tensor_parallelize(model, group=_world())
    with pytest.raises(ValueError, match=f"between 0 and num_embeddings=101; found .*{wrong}"):
        model(input_ids=_TOKENS.index_fill(1, torch.tensor(3), wrong))


@ranks(2)
def test_nothing_is_changed_by_a_plan_that_is_refused():
    model = _Plain()
    before = str(model)
    with pytest.raises(ValueError, match="length 7 of dimension 0"):
        tensor_parallelize(model, {**_PLAIN_PLAN, "classes": "heads"}, group=_world())
    assert str(model) == before
    assert all(not specs for _, _, specs in marks(model))


@ranks(2)
def test_cutting_a_model_leaves_torchs_generator_alone():
    model = _Plain()
    before = torch.get_rng_state()
    tensor_parallelize(model, _PLAIN_PLAN, group=_world())
    assert torch.equal(torch.get_rng_state(), before)
