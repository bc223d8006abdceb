"""Adapters compute, train and start as in one process, on every kind of layer and any cut."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megablocks_core.groups import Group, Segment, chunk_slice, gather_from, specs_of
from megablocks_core.parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    add_lora,
    gather_features,
    tensor_parallelize,
)
from megablocks_core.testing import assert_parallel_equivalence, ranks
from tests.parallel.lora_models import fill
from tests.parallel.tiny_models import tiny_model

_TOKENS = torch.arange(16).view(2, 8) * 7 % 101
_ALL = ["embed_tokens", "*_proj", "lm_head"]


def _world() -> Group:
    return Group.of(dist.group.WORLD)


def _loss(output):
    logits = output.logits if hasattr(output, "logits") else output
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype)
    return (logits.reshape(-1) * weights).sum() + logits.square().mean()


@ranks(1, 2, 4)
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("kind", "num_key_value_heads"), [("llama", 2), ("qwen3", 4)])
def test_transformers_models_with_adapters_equal_one_process(
    kind, num_key_value_heads, sequence_parallel, before
):
    def build(group):
        model = tiny_model(kind, num_key_value_heads=num_key_value_heads)
        if before:
            fill_and_add(model)
            tensor_parallelize(model, group=group, sequence_parallel=sequence_parallel)
        else:
            tensor_parallelize(model, group=group, sequence_parallel=sequence_parallel)
            fill_and_add(model)
        return model

    def fill_and_add(model):
        add_lora(model, _ALL, rank=3, alpha=6)
        fill(model)

    assert_parallel_equivalence(
        build, {"input_ids": _TOKENS}, group=_world(), loss=_loss, same_start=True
    )


_LAYERS = {
    "column": lambda group, sp: ColumnParallelLinear(12, 16, sequence_parallel=sp, group=group),
    "packed": lambda group, sp: ColumnParallelLinear(
        12, 16, segments=(Segment(8), Segment(4), Segment(4)), sequence_parallel=sp, group=group
    ),
    "gathered": lambda group, sp: ColumnParallelLinear(
        12, 16, gather_output=True, sequence_parallel=sp, group=group
    ),
    "row": lambda group, sp: RowParallelLinear(
        12, 16, input_is_parallel=False, sequence_parallel=sp, group=group
    ),
    "packed row": lambda group, sp: RowParallelLinear(
        12,
        16,
        input_is_parallel=False,
        segments=(Segment(8), Segment(4)),
        sequence_parallel=sp,
        group=group,
    ),
    "embedding": lambda group, sp: VocabParallelEmbedding(
        9, 16, padding_idx=4, sequence_parallel=sp, group=group
    ),
}


@ranks(1, 2, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("kind", _LAYERS)
def test_layers_with_adapters_equal_one_process(kind, sequence_parallel):
    world = _world()
    cuts_input = sequence_parallel and kind in ("column", "packed", "gathered")
    cuts_output = sequence_parallel and not cuts_input

    def build(group):
        layer = nn.Sequential(_LAYERS[kind](group, sequence_parallel))
        add_lora(layer, "0", rank=2, alpha=3)
        return fill(layer)

    def own(x):
        return x[..., chunk_slice(8, world.size, world.rank), :] if cuts_input else x

    def join(y):
        if cuts_output:
            return gather_from(y, dim=-2, group=world)
        return gather_features(y, _cut(kind, world)) if kind in ("column", "packed") else y

    ids = torch.arange(16).view(2, 8) * 5 % 9
    features = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(0))
    assert_parallel_equivalence(
        build,
        (ids if kind == "embedding" else features,),
        group=world,
        loss=_loss,
        split=lambda inputs: tuple(own(x) for x in inputs),
        join=join,
        same_start=True,
    )


def _cut(kind, group):
    return specs_of(_LAYERS[kind](group, False), "weight")[0]
