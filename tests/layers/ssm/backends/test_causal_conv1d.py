"""What ``causal_conv1d`` is handed means the same there."""

from importlib import import_module

import pytest
import torch
from torch.testing import assert_close

from megablocks_core.layers.ssm.backends import causal_conv1d as backend
from megablocks_core.layers.ssm.functions.recurrences import causal_conv1d_recurrence
from megablocks_core.layers.ssm.functions.steps import causal_conv1d_step
from tests.layers.ssm import mamba_ssm_oracle as oracle
from tests.layers.ssm.backends.published import record_of, signature, stand_in

WHOLE, UPDATE = "causal_conv1d.causal_conv1d_fn", "causal_conv1d.causal_conv1d_update"

interface = oracle.causal_conv1d("causal_conv1d_interface")
needs_oracle = pytest.mark.skipif(interface is None, reason="oracle mamba")


def drawn(rows=2, width=4):
    torch.manual_seed(0)
    x, state = torch.randn(rows, 9, 8), torch.randn(rows, width - 1, 8)
    return (x, torch.randn(8, width), torch.randn(8)), state


def theirs(x, weight, bias, *, seq_idx, initial_states, return_final_states, activation):
    """Their function by our twin; what it says of memory must hold."""
    assert x.stride(1) == 1
    sums = None
    if seq_idx is not None:
        assert not return_final_states and seq_idx.dtype == torch.int32
        lengths = seq_idx[0].unique_consecutive(return_counts=True)[1]
        sums = torch.tensor([0, *lengths]).cumsum(0)
    state = None
    if initial_states is not None:
        assert initial_states.stride(1) == 1
        state = initial_states.transpose(1, 2)
    options = {"activation": activation == "silu", "initial_state": state, "cu_seqlens": sums}
    y, final = causal_conv1d_recurrence(x.transpose(1, 2), weight, bias, **options)
    return (y.mT, final.mT) if return_final_states else y.mT


def update(x, conv_state, weight, bias, activation):
    y, after = causal_conv1d_step(
        x, weight, bias, state=conv_state.mT, activation=activation == "silu"
    )
    conv_state.copy_(after.mT)
    return y


@pytest.fixture(params=["stand-in", pytest.param("reference", marks=needs_oracle)])
def published(request, monkeypatch):
    if request.param == "stand-in":
        stand_in(monkeypatch, WHOLE, theirs)
        stand_in(monkeypatch, UPDATE, update)
    else:
        package = import_module("causal_conv1d")
        monkeypatch.setattr(package, "causal_conv1d_fn", interface.causal_conv1d_ref)
        monkeypatch.setattr(package, "causal_conv1d_update", interface.causal_conv1d_update_ref)


@pytest.mark.parametrize("activation", [False, True])
def test_rows_with_states(published, activation):
    tensors, state = drawn()
    options = {"initial_state": state, "activation": activation}
    assert_close(
        backend.causal_conv1d(*tensors, **options), causal_conv1d_recurrence(*tensors, **options)
    )


def test_rows_without_states(published):
    tensors, _ = drawn(width=3)
    y, none = backend.causal_conv1d(*tensors, return_final_state=False)
    assert none is None
    assert_close(y, causal_conv1d_recurrence(*tensors)[0])


def test_documents(published):
    tensors, _ = drawn(rows=1)
    sums = torch.tensor([0, 2, 2, 7])
    y, _ = backend.causal_conv1d(*tensors, cu_seqlens=sums, return_final_state=False)
    assert_close(y, causal_conv1d_recurrence(*tensors, cu_seqlens=sums)[0])


@pytest.mark.parametrize("width", [2, 4])
def test_a_step_leaves_the_state_that_it_gets(published, width):
    (x, weight, bias), state = drawn(width=width)
    before = state.clone()
    given = backend.causal_conv1d_step(x[:, 0], weight, bias, state=state, activation=True)
    assert_close(state, before, rtol=0, atol=0)
    right = causal_conv1d_step(x[:, 0], weight, bias, state=state, activation=True)
    assert_close(given, right)


def test_sizes_that_are_not_served():
    x = torch.randn(1, 4, 8)
    with pytest.raises(ValueError, match="does not serve 5 taps"):
        backend.causal_conv1d(x, torch.randn(8, 5))
    with pytest.raises(ValueError, match="channels that are no multiple of 8"):
        backend.causal_conv1d(x[..., :7], torch.randn(7, 4))
    state = torch.zeros(1, 0, 8)
    with pytest.raises(ValueError, match="does not serve 1 taps"):
        backend.causal_conv1d_step(x[:, 0], torch.randn(8, 1), state=state)
    with pytest.raises(ValueError, match="does not serve float64"):
        backend.causal_conv1d_step(x[:, 0].double(), torch.randn(8, 2), state=torch.zeros(1, 1, 8))


@needs_oracle
def test_arguments_are_those_of_the_package():
    for name in (WHOLE, UPDATE):
        recorded = signature(name).parameters.values()
        function = getattr(interface, name.split(".")[1])
        assert record_of(function) == [(each.name, each.kind, each.default) for each in recorded]
