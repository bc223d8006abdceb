"""Adapters are cut with their layers, and start with the same bits at any cut."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megablocks_core.groups import LOCAL, Group, Segment, gather_whole, mark, marks
from megablocks_core.groups.cuts import ShardSpec
from megablocks_core.parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    add_lora,
    clip_grad_norm_,
    reset_parameters,
    tensor_parallelize,
)
from megablocks_core.parallel.lora.layers import place_of
from megablocks_core.testing import ranks


def _world() -> Group:
    return Group.of(dist.group.WORLD)


def _model(group):
    packed = (Segment(8), Segment(4, parts=min(2, group.size)), Segment(4))
    return nn.Sequential(
        VocabParallelEmbedding(9, 12, group=group),
        ColumnParallelLinear(12, 16, segments=packed, group=group),
        RowParallelLinear(16, 12, group=group),
        nn.Linear(12, 8),
    )


@ranks(1, 2, 4)
@pytest.mark.parametrize("way", ["seed", "generator", "meta"])
def test_initial_values_have_the_bits_of_one_process(way):
    start = {}
    for group in (LOCAL, _world()):
        torch.manual_seed(5)
        if way == "meta":
            with torch.device("meta"):
                model = _model(group)
                add_lora(model, "*", rank=3, alpha=6)
            reset_parameters(model.to_empty(device="cpu"), seed=1)
        else:
            model = _model(group)
            add_lora(model, "*", rank=3, alpha=6, seed=1 if way == "seed" else None)
        start[group.size > 1] = gather_whole(model)
    for name, tensor in start[False].items():
        assert "lora" not in name or torch.equal(start[_world().size > 1][name], tensor), name
    assert start[False]["1.lora_A.weight"].any() and not start[False]["1.lora_B.weight"].any()
    assert start[False]["0.lora_embedding_B.weight"].any()
    assert not start[False]["0.lora_embedding_A.weight"].any()


@ranks(2)
def test_one_factor_is_cut_with_the_layer_and_the_other_is_whole():
    model = _model(_world())
    add_lora(model, "*", rank=3, alpha=6)
    cuts = {name: [spec.dim for spec in specs] for name, _, specs in marks(model)}
    assert {name: dims for name, dims in cuts.items() if "lora" in name} == {
        "0.lora_embedding_A.weight": [1],
        "0.lora_embedding_B.weight": [],
        "1.lora_A.weight": [],
        "1.lora_B.weight": [0],
        "2.lora_A.weight": [1],
        "2.lora_B.weight": [],
        "3.lora_A.weight": [],
        "3.lora_B.weight": [],
    }
    shapes = {name: list(x.shape) for name, x in gather_whole(model).items()}
    assert shapes["0.lora_embedding_A.weight"] == [3, 9]
    assert shapes["1.lora_B.weight"] == [16, 3]


@ranks(2)
def test_whole_factors_count_once_in_the_norm():
    model = _model(_world())
    add_lora(model, "*", rank=3, alpha=6)
    total = 0
    for _, parameter, specs in marks(model):
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
            whole = parameter.numel() * (2 if specs else 1)
            total += whole
    # The embedding's nine columns are cut in five and four.
    total += 3 * 9 - 2 * model.get_parameter("0.lora_embedding_A.weight").numel()
    assert clip_grad_norm_(model, 1.0) == pytest.approx(total**0.5)


@ranks(2)
def test_whole_layers_on_own_tokens_sum_both_factors():
    """In a model whose tokens the caller cuts, a layer outside the plan sees a part of them."""
    group = _world()

    def build(cut, before):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        model.double()
        if before:
            add_lora(model, ["0", "1"], rank=2, alpha=4, seed=3)
        if cut:
            tensor_parallelize(
                model, {"1": "column", "3": "row"}, group=group, sequence_parallel=True
            )
        if not before:
            add_lora(model, ["0", "1"], rank=2, alpha=4, seed=3)
        nn.init.ones_(model.get_parameter("0.lora_B.weight"))
        return model

    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = build(False, True)
    whole(x).square().sum().backward()
    for before in (True, False):
        model = build(True, before)
        model(x.chunk(2)[group.rank]).square().sum().backward()
        for factor in ("lora_A", "lora_B"):
            ours, theirs = (part[0].get_parameter(f"{factor}.weight") for part in (model, whole))
            torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-10, rtol=0)


class _Scaled(nn.Embedding):
    pass


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.LayerNorm(8), "it is a LayerNorm; adapters are served on Linear, ColumnParallelLinear"),
        (nn.Conv1d(8, 8, 1), "it is a Conv1d; adapters"),
        (nn.MultiheadAttention(8, 1).out_proj, "it is a NonDynamicallyQuantizableLinear; adapters"),
        (_Scaled(8, 8), "_Scaled; adapters"),
    ],
)
def test_layers_that_are_not_served_are_named(layer, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        place_of("it", layer)


@ranks(2)
def test_cuts_that_are_not_known_are_refused():
    layer = nn.Linear(8, 8)
    mark(layer, "weight", ShardSpec(1, _world()))
    with pytest.raises(ValueError, match=r"it\.weight is cut by .*, which adapters do not serve"):
        place_of("it", layer)


@ranks(2)
def test_sharded_weights_are_refused():
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(8, 8))
    fully_shard(model)
    with pytest.raises(ValueError, match="add adapters before fully_shard"):
        add_lora(model, "0", rank=2, alpha=4)
