"""Tokens reduced to a transition and a state are the recurrence, in any blocks."""

import pytest
import torch
from torch.testing import assert_close

from megablocks_core.layers.ssm.functions.recurrences import ssd_recurrence
from megablocks_core.layers.ssm.functions.ssd import reduction
from megablocks_core.layers.ssm.functions.ssd.reduction import reduced
from tests.layers.ssm.functions.ssd.cases import draw


def _gradients(results, leaves):
    loss = sum((result * (result.detach() + 1)).sum() for result in results)
    return torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("counted", [0, 1, 20, 41])
@pytest.mark.parametrize("block", [1, 10_000])
@pytest.mark.parametrize("strength", [1.0, 100.0])
def test_a_state_is_mapped_as_by_the_recurrence(monkeypatch, counted, block, strength):
    """The last tokens count, after an earlier document's."""
    monkeypatch.setattr(reduction, "_BLOCK", block)
    x, dt, A, B, *_ = draw(2, 41, 4, 2, strength=strength)
    here = torch.arange(41) >= 41 - counted
    transition, state = reduced(x, dt, A, B, here)
    some = [part[:, 41 - counted :] for part in (x, dt, B)]
    _, right = ssd_recurrence(some[0], some[1], A, some[2], torch.zeros_like(some[2]))
    whole = torch.exp((some[1] * A).sum(1))
    assert_close(state, right, rtol=0, atol=1e-11)
    assert_close(transition, whole, rtol=0, atol=1e-11)
    for mine, theirs in zip(
        _gradients((transition, state), (x, dt, A, B)),
        _gradients((whole, right), (x, dt, A, B)),
        strict=True,
    ):
        assert_close(mine, theirs, rtol=0, atol=1e-10)


def test_kept_are_the_arguments_alone():
    x, dt, A, B, *_ = draw(1, 5, 4, 2)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        reduced(x, dt, A, B, None)
    assert [part.data_ptr() for part in kept] == [part.data_ptr() for part in (x, dt, A, B)]
