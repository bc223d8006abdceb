"""Loads of experts are shares of all ranks' choices, and are drawn a map a layer."""

import math
from io import BytesIO
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megablocks_core.groups import Mesh
from megablocks_core.testing import ranks
from megablocks_core.train import Mean, expert_load
from megablocks_core.train.expert_load import expert_loads, plot_expert_load
from megablocks_core.train.folder import Run
from megablocks_core.train.lines import Line


def run_of(*values):
    return Run(Path("run"), [Line(10 * n, 0.0, v) for n, v in enumerate(values)], [], {})


@ranks(1, 2)
def test_a_share_is_that_of_all_ranks():
    world = Mesh().group("dp")
    rank, size = dist.get_rank(), dist.get_world_size()
    uneven = torch.tensor([6, 2, 0, 0]) * (rank + 1)
    metrics = expert_load([uneven, torch.tensor([rank, 1])], group=world)
    total = sum(range(1, size + 1))
    assert [metrics[f"expert_load/0/{e}"].sum for e in range(4)] == [6 * total, 2 * total, 0, 0]
    assert metrics["expert_load/0/1"] == 0.25
    assert metrics["expert_load/1/1"].count == sum(range(size)) + size


def test_layers_without_experts_are_refused():
    for counts in ([], [torch.zeros(2, 2)]):
        with pytest.raises(ValueError, match="tokens_per_expert of shapes"):
            expert_load(counts)


def test_a_fair_share_is_one_and_layers_are_kept_apart():
    first = expert_load([torch.tensor([2, 2]), torch.tensor([3, 0, 0])])
    run = run_of(first, {"loss": Mean(1.0)}, expert_load([torch.tensor([1, 3])]))
    assert expert_loads(run) == {
        0: {0: {0: 1.0, 20: 0.5}, 1: {0: 1.0, 20: 1.5}},
        1: {0: {0: 3.0}, 1: {0: 0.0}, 2: {0: 0.0}},
    }


@pytest.mark.parametrize("steps", [1, 3])
def test_a_map_is_drawn_where_there_are_loads(steps):
    target = BytesIO()
    loads = expert_load([torch.tensor([5, 1]), torch.tensor([0, 0])])
    assert math.isnan(loads["expert_load/1/0"])
    assert plot_expert_load(run_of(*[loads] * steps), target)
    assert target.getvalue().startswith(b"\x89PNG")


def test_without_loads_there_is_no_map():
    target = BytesIO()
    assert not plot_expert_load(run_of({"loss": Mean(1.0)}), target)
    assert target.getvalue() == b""
