"""Heads of a model that is cut: fewer key heads than ranks, gathered ones, their weights."""

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from megablocks_core.groups import Group, Segment, gather_from, scatter_to
from megablocks_core.parallel import Column, Row, add_lora, tensor_parallelize
from megablocks_core.testing import assert_parallel_equivalence, ranks
from tests.parallel.lora_models import fill
from tests.parallel.tiny_models import GROUPED_PLAN, Grouped, tiny_model

_TOKENS = torch.arange(16).view(2, 8) * 7 % 101


def _world() -> Group:
    return Group.of(dist.group.WORLD)


def _loss(output):
    weights = torch.linspace(-1, 1, output.logits.numel(), dtype=output.logits.dtype)
    return (output.logits.reshape(-1) * weights).sum() + output.logits.square().mean()


@ranks(1, 2, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("kind", ["phi3", "olmo2"])
def test_attention_that_gathers_its_columns_equals_one_process(kind, sequence_parallel):
    """Packed projections and norms over all heads; one key head, which no rank has to share."""

    def build(group):
        model = tiny_model(kind, num_key_value_heads=1)
        report = tensor_parallelize(model, group=group, sequence_parallel=sequence_parallel)
        own = {name for name in report.summed if "self_attn" in name}
        assert not own and all(".q_norm." not in name for name in report.cut)
        return model

    assert_parallel_equivalence(
        build, {"input_ids": _TOKENS}, group=_world(), loss=_loss, same_start=True
    )


@ranks(2)
def test_adapters_of_gathered_columns_add_to_own_features():
    def build(group):
        model = tiny_model("olmo2", num_key_value_heads=2)
        tensor_parallelize(model, group=group, sequence_parallel=True)
        add_lora(model, ["q_proj", "v_proj", "o_proj"], rank=3, alpha=6)
        return fill(model)

    assert_parallel_equivalence(
        build, {"input_ids": _TOKENS}, group=_world(), loss=_loss, same_start=True
    )


@ranks(4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("num_key_value_heads", [1, 2])
def test_key_heads_may_be_fewer_than_ranks(num_key_value_heads, sequence_parallel):
    def build(group):
        model = tiny_model("llama", num_key_value_heads=num_key_value_heads)
        tensor_parallelize(model, group=group, sequence_parallel=sequence_parallel)
        return model

    assert_parallel_equivalence(
        build, {"input_ids": _TOKENS}, group=_world(), loss=_loss, same_start=True
    )


@ranks(1, 2, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_shared_key_heads_of_ones_own_model_sum_their_gradients_once(sequence_parallel):
    group = _world()

    def build(group):
        model = Grouped()
        tensor_parallelize(model, GROUPED_PLAN, group=group, sequence_parallel=sequence_parallel)
        return model

    def own(x):
        return scatter_to(x, dim=-2, group=group) if sequence_parallel else x

    def whole(y):
        return gather_from(y, dim=-2, group=group) if sequence_parallel else y

    x = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0))
    assert_parallel_equivalence(
        build, x, group=group, loss=lambda y: y.square().sum(), split=own, join=whole
    )


def _gathered_plan(group):
    """Key heads whole, key weights repeated, value heads in slices that neighbours hold too."""
    return {
        "q_proj": "column_gather",
        "k_proj": Column(repeat=True, gather=True),
        "v_proj": Column(segments=[Segment(8, parts=min(2, group.size))], gather=True),
        "o_proj": Row(split_input=True),
    }


@ranks(1, 2, 4)
def test_gathered_key_heads_are_not_counted_as_this_ranks_own():
    """Every rank goes on with all heads, so a query head still meets its own key head."""

    def build(group):
        model = Grouped()
        tensor_parallelize(model, _gathered_plan(group), group=group)
        assert model.num_key_value_groups == 2
        return model

    x = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0))
    assert_parallel_equivalence(build, x, group=_world(), loss=lambda y: y.square().sum())


@ranks(2)
def test_own_query_heads_with_all_key_heads_are_refused():
    for name in ("q_proj", "k_proj", "v_proj"):
        with pytest.raises(ValueError, match=rf"gather all of .* or none, not \['{name}'\] alone"):
            plan = {**GROUPED_PLAN, name: "column_gather"}
            tensor_parallelize(Grouped(), plan, group=_world())


@ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_attention_weights_of_own_heads_alone_are_refused(sequence_parallel):
    group = _world()
    model = tiny_model("llama", attn_implementation="eager")
    tensor_parallelize(model, group=group, sequence_parallel=sequence_parallel)
    for called in (model, model.model):
        with pytest.raises(ValueError, match="output_attentions=True must not be set where"):
            called(input_ids=_TOKENS, output_attentions=True)
    model.config.output_attentions = True
    with pytest.raises(ValueError, match="output_attentions=True must not be set where"):
        model(input_ids=_TOKENS)
    assert model(input_ids=_TOKENS, output_attentions=False).attentions is None

    torch.manual_seed(0)
    whole, cut = (tiny_model("phi3", attn_implementation="eager") for _ in range(2))
    cut.load_state_dict(whole.state_dict())
    tensor_parallelize(cut, group=group, sequence_parallel=sequence_parallel)
    ours, theirs = (
        part(input_ids=_TOKENS, output_attentions=True).attentions for part in (cut, whole)
    )
    assert_close(ours, theirs, atol=1e-7, rtol=0)  # eager attention has a softmax in float32
