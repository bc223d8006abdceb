"""The plain twins: exact small values, documents one by one, states handed on."""

import math

import pytest
import torch
from torch.testing import assert_close

from megablocks_core.layers.ssm.functions.recurrences import (
    causal_conv1d_recurrence,
    gated_delta_recurrence,
    selective_recurrence,
    ssd_recurrence,
)

F64 = torch.float64
ONES = torch.ones(1, 3, 1, dtype=F64)
F085 = torch.tensor([0.6931472, 1.0397208, 1.2130076], dtype=F64)


def _draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=F64)


def test_f085_a_small_recurrence_has_these_values():
    steps, rate = math.log(2) * ONES, -torch.ones(1, dtype=F64)
    y, state = selective_recurrence(ONES, steps, rate[:, None], ONES, ONES)
    assert_close(y.flatten(), F085, rtol=0, atol=1e-7)
    assert_close(state.flatten(), F085[-1:], rtol=0, atol=1e-7)
    four = ONES[..., None]
    y, state = ssd_recurrence(four, steps, rate, four, four)
    assert_close(y.flatten(), F085, rtol=0, atol=1e-7)
    assert_close(state.flatten(), F085[-1:], rtol=0, atol=1e-7)


def _calls():
    torch.manual_seed(0)
    A = -torch.rand(4, 3, dtype=F64)
    beta = torch.rand(1, 9, 2, dtype=F64)
    return {
        "convolution": (causal_conv1d_recurrence, [_draw(1, 9, 4)], [_draw(4, 3)], (2, 4)),
        "selective": (
            selective_recurrence,
            [_draw(1, 9, 4), torch.rand(1, 9, 4, dtype=F64), A, _draw(1, 9, 3), _draw(1, 9, 3)],
            [],
            (4, 3),
        ),
        "ssd": (
            ssd_recurrence,
            [_draw(1, 9, 4, 2), torch.rand(1, 9, 4, dtype=F64), A[:, 0]]
            + [_draw(1, 9, 2, 3), _draw(1, 9, 2, 3)],
            [],
            (4, 2, 3),
        ),
        "delta": (
            gated_delta_recurrence,
            [_draw(1, 9, 2, 3), _draw(1, 9, 2, 3), _draw(1, 9, 2, 5)]
            + [-torch.rand(1, 9, 2, dtype=F64), beta],
            [],
            (2, 3, 5),
        ),
    }


@pytest.mark.parametrize("name", _calls())
def test_documents_are_gone_through_one_by_one(name):
    """An empty one hands its state on; what stands behind the last starts from zeros."""
    function, inputs, weights, shape = _calls()[name]
    before = _draw(3, *shape)
    y, after = function(
        *inputs, *weights, initial_state=before, cu_seqlens=torch.tensor([0, 2, 2, 7])
    )
    for index, (start, stop) in enumerate([(0, 2), (2, 2), (2, 7), (7, 9)]):
        part = [x[:, start:stop] if x.shape[:2] == (1, 9) else x for x in inputs]
        state = before[index : index + 1] if index < 3 else None
        alone, last = function(*part, *weights, initial_state=state)
        assert_close(y[:, start:stop], alone)
        if index < 3:
            assert_close(after[index], last[0])


@pytest.mark.parametrize("name", _calls())
def test_a_sequence_may_be_gone_through_in_two_parts(name):
    function, inputs, weights, _ = _calls()[name]
    whole, last = function(*inputs, *weights)
    first = [x[:, :4] if x.shape[:2] == (1, 9) else x for x in inputs]
    second = [x[:, 4:] if x.shape[:2] == (1, 9) else x for x in inputs]
    y, state = function(*first, *weights)
    rest, end = function(*second, *weights, initial_state=state)
    assert_close(torch.cat((y, rest), dim=1), whole)
    assert_close(end, last)


@pytest.mark.parametrize("name", _calls())
def test_no_token_gives_no_output_and_the_state_as_it_was(name):
    function, inputs, weights, shape = _calls()[name]
    none = [x[:, :0] if x.shape[:2] == (1, 9) else x for x in inputs]
    before = _draw(1, *shape)
    y, after = function(*none, *weights, initial_state=before)
    whole, _ = function(*inputs, *weights)
    assert y.shape == (1, 0, *whole.shape[2:])
    assert torch.equal(after, before)
