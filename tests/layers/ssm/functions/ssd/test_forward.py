"""Forward keeps the states it says, and plans change nothing but what is done at a time."""

import pytest
import torch
from torch.testing import assert_close

from megablocks_core.layers.ssm.functions.recurrences import ssd_recurrence
from megablocks_core.layers.ssm.functions.ssd import plan
from megablocks_core.layers.ssm.functions.ssd.chunks import Inputs
from megablocks_core.layers.ssm.functions.ssd.forward import scan
from tests.layers.ssm.functions.ssd.cases import draw


def _inputs(leaves):
    return Inputs(*(leaf.detach() for leaf in leaves[:5]), None, None, None)


@pytest.mark.parametrize("every_chunk", [False, True])
@pytest.mark.parametrize("length", [0, 3, 16, 64, 70, 72, 150])
def test_kept_are_the_states_before_every_eighth_chunk_or_before_each(length, every_chunk):
    inputs = _inputs(draw(2, length, 4, 2))
    found = scan(inputs, None, 4, every_chunk)
    step, whole = (1 if every_chunk else plan.EVERY), length // 4
    starts = [4 * chunk for chunk in range(0, whole, step)] + [4 * whole] * (length % 4 > 0)
    assert len(found.states) == len(starts)
    for state, start in zip(found.states, starts, strict=True):
        x, dt, B, C = (part[:, :start] for part in (inputs.x, inputs.dt, inputs.B, inputs.C))
        assert_close(state, ssd_recurrence(x, dt, inputs.A, B, C)[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("numbers", [1, 200, 400, 1_000, 3_000, 10_000])
def test_any_plan_gives_the_same(monkeypatch, numbers):
    inputs = _inputs(draw(3, 70, 6, 2))
    right = scan(inputs, None, 4, False)
    monkeypatch.setattr(plan, "_ON_CPU", numbers)
    for ours, theirs in zip(scan(inputs, None, 4, False), right, strict=True):
        assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_a_carry_is_left_as_it_is():
    inputs, carry = _inputs(draw(1, 9, 4, 2)), torch.ones(1, 4, 3, 4, dtype=torch.float64)
    scan(inputs, carry, 4, False)
    assert (carry == 1).all()
