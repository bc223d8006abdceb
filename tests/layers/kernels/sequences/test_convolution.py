"""The convolution in Triton is its recurrence, with all gradients, as ``causal_conv1d`` uses it."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megablocks_core.layers.kernels.sequences import convolution as launches
from megablocks_core.layers.ssm.functions.convolution import causal_conv1d
from megablocks_core.layers.ssm.functions.recurrences import causal_conv1d_recurrence
from tests.layers.kernels.interpreter import interpreted
from tests.layers.kernels.sequences.serving import (
    LIMITS,
    assert_near,
    in_triton,
    narrowed,
    widened,
)

LENGTHS = [3, 1, 0, 20, 9]
# Rows, tokens, channels, taps, a bias, SiLU, documents, states.
CASES = {
    "rows with states": (2, 37, 67, 4, True, True, False, True),
    "documents": (1, 37, 5, 4, True, True, True, False),
    "documents with states": (1, 37, 5, 3, False, True, True, True),
    "no bias and no SiLU": (2, 9, 3, 4, False, False, False, False),
    "one tap": (1, 9, 3, 1, True, True, False, False),
}


def run(function, leaves, **options):
    x, weight, bias, state = leaves
    y, final = function(x, weight, bias, initial_state=state, **options)
    given = [leaf for leaf in leaves if leaf is not None]
    loss = (y * (y.detach() + 1)).sum() + (final * 2).sum()
    return [y, final, *torch.autograd.grad(loss, given)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, *(pytest.param(each, marks=pytest.mark.slow) for each in list(LIMITS)[1:])],
)
@interpreted
def test_outputs_states_and_gradients(case, dtype):
    rows, length, channels, width, biased, activation, parted, stateful = CASES[case]
    documents = {"cu_seqlens": torch.tensor([0, *LENGTHS]).cumsum(0)} if parted else {}
    count = len(LENGTHS) if parted else rows
    drawn = [
        torch.randn(rows, length, channels),
        torch.randn(channels, width),
        torch.randn(channels) if biased else None,
        torch.randn(count, width - 1, channels) if stateful else None,
    ]
    leaves = narrowed(drawn, dtype)
    with in_triton() as taken:
        results = run(causal_conv1d, leaves, activation=activation, **documents)
    assert len(taken) >= 2
    right = run(causal_conv1d_recurrence, widened(leaves), activation=activation, **documents)
    assert_near(results, right, LIMITS[dtype])


@interpreted
def test_what_stands_in_other_documents_is_not_read():
    x, weight = torch.randn(1, 8, 2), torch.randn(2, 4)
    x[:, 3] = torch.nan
    with in_triton():
        y, _ = causal_conv1d(x, weight, cu_seqlens=torch.tensor([0, 3, 4, 8]))
    assert y.isnan().any(-1)[0].tolist() == [False] * 3 + [True] + [False] * 4


def test_nothing_is_read_on_the_host(monkeypatch):
    seen = []
    monkeypatch.setattr(launches, "launch", lambda kernel, *rest, **named: seen.append(kernel))
    with FakeTensorMode():
        x, carry, weight = torch.zeros(2, 9, 4), torch.zeros(2, 2, 4), torch.zeros(4, 3)
        given = (x, carry, weight, weight[:, 0], None)
        y = launches.convolve(*given, activation=True)
        gradients = launches.convolve_gradients(*given, activation=True, dy=y)
    assert len(seen) == 3
    assert [each.shape for each in gradients] == [each.shape for each in given[:4]]
