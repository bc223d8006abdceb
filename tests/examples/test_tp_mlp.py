"""tp_mlp.py prints what it says, on one rank and on two, and trains the stored curve."""

import json
import re
from pathlib import Path

import pytest

from examples.tp_mlp import train
from megablocks_core.groups import LOCAL

GOLDEN = Path(__file__).with_name("tp_mlp.json")


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_runs_as_a_script(ranks, printed):
    first, *others = printed("tp_mlp.py", ranks=ranks)
    assert re.fullmatch(r"loss \d\.\d{4} -> \d\.\d{4}, equal to one process\n", first)
    assert not any(others)


def test_golden_curve():
    golden = json.loads(GOLDEN.read_text())
    assert train(LOCAL) == pytest.approx(golden["loss"], rel=0, abs=1e-12)
