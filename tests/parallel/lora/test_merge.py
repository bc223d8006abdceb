"""Merged adapters compute the same, send nothing, and leave no trace when unmerged."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing import assert_close

from megablocks_core.groups import LOCAL, Group, Segment, gather_whole
from megablocks_core.parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    add_lora,
    merge_lora,
    remove_lora,
    unmerge_lora,
)
from megablocks_core.testing import ranks
from tests.parallel.lora_models import fill

_IDS = torch.arange(9)


def _model(group=LOCAL, dtype=torch.float64):
    torch.manual_seed(0)
    model = nn.Sequential(
        VocabParallelEmbedding(9, 8, group=group),
        ColumnParallelLinear(8, 16, segments=(Segment(8), Segment(8)), group=group),
        RowParallelLinear(16, 8, group=group),
        nn.Linear(8, 8),
    ).to(dtype)
    add_lora(model, "*", rank=2, alpha=3)
    return fill(model)


@ranks(1, 2, 4)
def test_merged_weights_compute_the_same_and_equal_one_process():
    group = Group.of(dist.group.WORLD)
    model, whole = _model(group), _model()
    y = model(_IDS)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with CommDebugMode() as traffic:
        merge_lora(model)
    assert traffic.get_total_counts() == 0
    merge_lora(whole)
    assert_close(model(_IDS), y, atol=1e-12, rtol=0)
    for name, tensor in gather_whole(whole).items():
        assert_close(gather_whole(model)[name], tensor, atol=1e-14, rtol=0)
    assert not torch.equal(model[1].weight, before["1.weight"])

    unmerge_lora(model)
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    assert torch.equal(model(_IDS), y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unmerging_restores_bits_that_rounding_lost(dtype):
    model = _model(dtype=dtype)
    weights = [layer.weight.clone() for layer in model]
    merge_lora(model)
    merge_lora(model)
    assert not torch.equal(model[3].weight, weights[3])
    unmerge_lora(model)
    unmerge_lora(model)
    for layer, weight in zip(model, weights, strict=True):
        assert torch.equal(layer.weight, weight)


def test_merged_adapters_rest_and_may_be_removed():
    model = _model()
    y = model(_IDS)
    merge_lora(model)
    merged = model(_IDS)
    assert not merged.requires_grad
    remove_lora(model)
    assert torch.equal(model(_IDS), merged)
    assert_close(merged, y)
    assert not any("lora" in name for name in model.state_dict())
    assert add_lora(model, "3", rank=2, alpha=1) == ("3",)


def test_tied_weights_are_not_merged():
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9, bias=False), nn.Linear(9, 9))
    model[1].weight = model[0].weight
    add_lora(model, "*", rank=2, alpha=4)
    fill(model)
    weight = model[2].weight.clone()
    with pytest.raises(ValueError, match=r"0\.weight must not be merged: it is tied to that of 1"):
        merge_lora(model)
    assert torch.equal(model[2].weight, weight)


@pytest.mark.parametrize("changed", ["weight", "lora_A.weight"])
def test_what_has_changed_is_not_unmerged(changed):
    model = _model()
    merge_lora(model)
    with torch.no_grad():
        model.get_parameter(f"1.{changed}").add_(1)
    with pytest.raises(ValueError, match="1 has changed since merge_lora"):
        unmerge_lora(model)
