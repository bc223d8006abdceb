"""pretrain_gpt.py with experts trains one curve at any layout, and tells how they are loaded."""

import json

import pytest
import torch
import torch.distributed as dist

from megablocks_core.testing import ranks
from megablocks_core.train import read_run
from megablocks_core.train.expert_load import expert_loads
from tests.examples.tiny import EXPERTS, GOLDEN_EXPERTS, assert_golden, curve, run_here, words


def test_golden_curve(tmp_path):
    stored_with = json.loads(GOLDEN_EXPERTS.read_text())["torch"]
    exact = torch.__version__.partition("+")[0] == stored_with
    run = run_here(tmp_path, *EXPERTS)
    assert_golden(run, tolerance=1e-12 if exact else 1e-9, stored=GOLDEN_EXPERTS)
    losses = list(curve(run)["loss"].values())
    assert losses[-1] < 0.75 * losses[0]
    loads = expert_loads(read_run(run))
    assert loads.keys() == {0, 1} and loads[0].keys() == {0, 1, 2, 3}
    assert all(
        sum(row[19] for row in layer.values()) == pytest.approx(4) for layer in loads.values()
    )


@pytest.mark.slow
@ranks(2, timeout=240)
def test_two_ranks_go_from_one_layout_to_the_next_on_the_golden_curve(tmp_path):
    _go_on(
        tmp_path,
        ["--tp=2", "--ep=2"],
        ["--zero=3", "--ep=2"],
        ["--tp=2", "--sequence-parallel", "--ep=2"],
        ["--zero=1"],
    )


@ranks(4, timeout=240)
def test_four_ranks_go_from_one_layout_to_the_next_on_the_golden_curve(tmp_path):
    _go_on(
        tmp_path,
        ["--tp=2", "--ep=2", "--zero=2"],
        ["--ep=4"],
        ["--tp=2", "--sequence-parallel", "--ep=2", "--etp=2"],
        ["--tp=2", "--sequence-parallel", "--ep=2", "--zero=3"],
    )


def _go_on(folder, *layouts):
    if dist.get_rank() == 0:
        words(folder)
    dist.barrier()
    for step, layout in zip((5, 10, 15, 20), layouts, strict=True):
        run = run_here(folder, *EXPERTS, *layout, f"--stop-after={step}")
    if dist.get_rank() == 0:
        assert_golden(run, tolerance=1e-9, stored=GOLDEN_EXPERTS)
