"""fsdp_train.py prints what it says and trains the stored curve in every mode, alone and on two."""

import json
import re
from pathlib import Path

import pytest
import torch.distributed as dist

from examples.fsdp_train import train
from megablocks_core.groups import LOCAL, Group
from megablocks_core.testing import ranks

GOLDEN = json.loads(Path(__file__).with_name("fsdp_train.json").read_text())
MODES = pytest.mark.parametrize("mode", ["DataParallel", "ShardedOptimizer", "fully_shard"])


@pytest.mark.parametrize(("ranks", "mode"), [(1, "ShardedOptimizer"), (2, "fully_shard")])
def test_it_runs_as_a_script(ranks, mode, printed):
    first, *others = printed("fsdp_train.py", "--mode", mode, ranks=ranks)
    assert re.fullmatch(mode + r": loss \d\.\d{4} -> \d\.\d{4}, equal to one process\n", first)
    assert not any(others)


@MODES
def test_golden_curve(mode):
    assert train(mode, LOCAL) == pytest.approx(GOLDEN["loss"], rel=0, abs=1e-12)


@ranks(2)
@MODES
def test_two_ranks_train_the_golden_curve(mode):
    group = Group.of(dist.group.WORLD)
    assert train(mode, group) == pytest.approx(GOLDEN["loss"], rel=0, abs=1e-9)
