"""The extension's passes over a chunk are the plain ones, and refuse what does not fit."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from megablocks_core.layers.ssm.functions.selective import passes
from megablocks_core.layers.ssm.functions.selective.passes import (
    chunk_backward,
    chunk_backward_plain,
    chunk_forward,
    chunk_forward_plain,
)

native = pytest.importorskip("megablocks_core._native")


def _tensors(tokens, channels, states, dtype, rows=2):
    """x, dt, B and C, A, a state, and gradients of outputs and of the state behind."""
    torch.manual_seed(0)
    inputs = [
        torch.randn(rows, tokens, channels),
        torch.rand(rows, tokens, channels),
        torch.randn(rows, tokens, states),
        torch.randn(rows, tokens, states),
    ]
    others = [
        -torch.rand(channels, states),
        torch.randn(rows, channels, states),
        torch.randn(rows, tokens, channels),
        torch.randn(rows, channels, states),
    ]
    return [x.to(dtype) for x in inputs], *(x.to(dtype) for x in others)


def _all_close(ours, right, dtype):
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for mine, other in zip(ours, right, strict=True):
        assert_close(mine, other, rtol=tolerance, atol=tolerance)


@given(
    st.integers(1, 20),
    st.sampled_from([1, 3, 63, 64, 65, 130]),
    st.integers(1, 18),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_the_extensions_passes_are_the_plain_ones(tokens, channels, states, dtype):
    inputs, A, state, dy, dstate = _tensors(tokens, channels, states, dtype)
    for outputs in (True, False):
        ours = chunk_forward(inputs, A, state, outputs=outputs)
        right = chunk_forward_plain(inputs, A, state, outputs=outputs)
        assert (ours[0] is None) == (not outputs)
        _all_close([x for x in ours if x is not None], [x for x in right if x is not None], dtype)
        of_y = dy if outputs else None
        ours = chunk_backward(inputs, A, state, of_y, dstate)
        right = chunk_backward_plain(inputs, A, state, of_y, dstate)
        _all_close((*ours.inputs, *ours[1:]), (*right.inputs, *right[1:]), dtype)


def test_any_number_of_threads_gives_the_same_bits():
    inputs, A, state, dy, dstate = _tensors(64, 1000, 16, torch.float32, rows=1)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        y, behind = chunk_forward(inputs, A, state, outputs=True)
        grads = chunk_backward(inputs, A, state, dy, dstate)
        results.append((y, behind, *grads.inputs, *grads[1:]))
    torch.set_num_threads(1)
    for one, *others in zip(*results, strict=True):
        assert all(torch.equal(one, other) for other in others)


def test_decays_of_every_size_are_those_of_torch():
    """From what leaves nothing to what grows without bound; what is no number stays none."""
    logs = torch.tensor([-torch.inf, -1e9, -200, -87.5, -86, -1, -1e-6, 0, 1, 80, 87, 100])
    logs = torch.cat((logs, torch.tensor([torch.inf, torch.nan])))
    channels = len(logs)
    one = torch.ones(1, 1, channels)
    inputs = [0 * one, one, torch.ones(1, 1, 1), torch.ones(1, 1, 1)]
    y, _ = chunk_forward(inputs, logs[:, None], torch.ones(1, channels, 1), outputs=True)
    assert y is not None
    assert_close(y.flatten(), logs.exp(), rtol=2e-7, atol=1.2e-38, equal_nan=True)


def test_without_the_extension_torch_does_it(monkeypatch):
    inputs, A, state, dy, dstate = _tensors(5, 3, 2, torch.float32)
    ours = chunk_backward(inputs, A, state, dy, dstate)
    y, _ = chunk_forward(inputs, A, state, outputs=True)
    monkeypatch.setattr(passes, "_native", None)
    plain = chunk_backward(inputs, A, state, dy, dstate)
    _all_close((*ours.inputs, *ours[1:]), (*plain.inputs, *plain[1:]), torch.float32)
    assert_close(chunk_forward(inputs, A, state, outputs=True)[0], y)


def test_wrong_shapes_are_refused():
    right = {name: np.zeros((4, 3), np.float32) for name in ("x", "dt")}
    right |= {name: np.zeros((4, 2), np.float32) for name in ("B", "C")}
    right |= {name: np.zeros((3, 2), np.float32) for name in ("A", "state")}
    outputs = {"y": np.zeros((4, 3), np.float32), "behind": np.zeros((3, 2), np.float32)}
    grads = {f"of_{name}": x.copy() for name, x in right.items()}
    grads |= {f"of_{name}": x.copy() for name, x in outputs.items()}
    native.selective_chunk(**right, **outputs)
    native.selective_chunk_gradients(**right, **grads)
    for arguments, function in (
        (right | outputs, native.selective_chunk),
        (right | grads, native.selective_chunk_gradients),
    ):
        for name in arguments:
            with pytest.raises(ValueError, match="must"):
                function(**{**arguments, name: np.zeros((5, 5), np.float32)})
        with pytest.raises(TypeError):
            function(**{**arguments, "x": np.zeros((4, 3))})
        with pytest.raises(ValueError, match="threads=0"):
            function(**arguments, threads=0)
