"""swap_hf_llama.py prints the same losses on one rank and on two."""

import json
import re
from pathlib import Path

import pytest

from examples.swap_hf_llama import train
from megablocks_core.groups import LOCAL

GOLDEN = Path(__file__).with_name("swap_hf_llama.json")


def test_one_rank_and_two_print_the_same_losses(printed):
    (alone,) = printed("swap_hf_llama.py")
    first, second = printed("swap_hf_llama.py", ranks=2)
    *steps, last = alone.splitlines()
    assert [step.split()[:3] for step in steps] == [["step", str(n), "loss"] for n in range(5)]
    assert first.splitlines()[:-1] == steps
    assert not second
    assert re.fullmatch(r"ranks: 1; cut [1-9]\d* parameters, kept [1-9]\d* whole", last)
    assert first.splitlines()[-1] == last.replace("ranks: 1", "ranks: 2")


def test_golden_curve():
    """In float32, as transformers computes norms and losses whatever the model's dtype."""
    golden = json.loads(GOLDEN.read_text())
    assert train(LOCAL, steps=20) == pytest.approx(golden["loss"], rel=0, abs=1e-4)
