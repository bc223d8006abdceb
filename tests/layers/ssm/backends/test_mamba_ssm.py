"""What ``mamba_ssm`` is handed means the same there."""

import pytest
import torch
from torch.testing import assert_close

from megablocks_core.layers.ssm.backends import mamba_ssm
from megablocks_core.layers.ssm.functions.recurrences import selective_recurrence, ssd_recurrence
from tests.layers.ssm import mamba_ssm_oracle as oracle
from tests.layers.ssm.backends.published import place, record_of, signature, stand_in

COMBINED = "mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined"
SELECTIVE = "mamba_ssm.ops.selective_scan_interface.selective_scan_fn"

combined = oracle.mamba_ssm("ops.triton.ssd_combined")
interface = oracle.mamba_ssm("ops.selective_scan_interface")
needs_oracle = pytest.mark.skipif(combined is None, reason="oracle mamba")


def drawn(rows=2, length=9):
    torch.manual_seed(0)
    x, dt = torch.randn(rows, length, 4, 3), torch.rand(rows, length, 4)
    A, D = -torch.rand(4), torch.randn(4)
    B, C = torch.randn(2, rows, length, 2, 5).unbind()
    return (x, dt, A, B, C), D, torch.randn(rows, 4, 3, 5)


def selective():
    torch.manual_seed(0)
    x, dt = torch.randn(2, 7, 6), torch.rand(2, 7, 6)
    B, C = torch.randn(2, 2, 7, 5).unbind()
    return (x, dt, -torch.rand(6, 5), B, C), torch.randn(6)


def theirs(x, dt, A, B, C, chunk_size, *, D, initial_states, seq_idx, return_final_states):
    """Their function by our twin: documents are what ``seq_idx`` parts."""
    assert chunk_size in (16, 32, 64, 128, 256)
    sums = None
    if seq_idx is not None:
        assert seq_idx.dtype == torch.int32 and seq_idx.shape == x.shape[:2]
        lengths = seq_idx[0].unique_consecutive(return_counts=True)[1]
        sums = torch.tensor([0, *lengths]).cumsum(0)
    y, final = ssd_recurrence(x, dt, A, B, C, D=D, initial_state=initial_states, cu_seqlens=sums)
    return (y, final) if return_final_states else y


def test_rows_with_states(monkeypatch):
    stand_in(monkeypatch, COMBINED, theirs)
    tensors, D, state = drawn()
    given = mamba_ssm.ssd_chunk_scan(*tensors, D=D, initial_state=state, chunk_size=5)
    assert_close(given, ssd_recurrence(*tensors, D=D, initial_state=state))


def test_documents(monkeypatch):
    stand_in(monkeypatch, COMBINED, theirs)
    tensors, D, _ = drawn(rows=1)
    sums = torch.tensor([0, 2, 2, 6])
    y, none = mamba_ssm.ssd_chunk_scan(
        *tensors, D=D, cu_seqlens=sums, chunk_size=500, return_final_state=False
    )
    assert none is None
    assert_close(y, ssd_recurrence(*tensors, D=D, cu_seqlens=sums)[0])


def test_mamba_1(monkeypatch):
    def scan(u, delta, A, B, C, D, return_last_state):
        tokens = [part.transpose(1, 2) for part in (u, delta, B, C)]
        y, last = selective_recurrence(tokens[0], tokens[1], A, tokens[2], tokens[3], D=D)
        return (y.transpose(1, 2), last) if return_last_state else y.transpose(1, 2)

    stand_in(monkeypatch, SELECTIVE, scan)
    tensors, D = selective()
    assert_close(mamba_ssm.selective_scan(*tensors, D=D), selective_recurrence(*tensors, D=D))
    y, none = mamba_ssm.selective_scan(*tensors, D=D, return_final_state=False)
    assert none is None and y.shape == tensors[0].shape


def test_mamba_1_gets_one_dtype_and_gives_that_of_x(monkeypatch):
    def scan(u, delta, A, B, C, D, return_last_state):
        assert {each.dtype for each in (u, delta, A, B, C, D)} == {torch.float32}
        return u

    stand_in(monkeypatch, SELECTIVE, scan)
    (x, dt, A, B, C), D = selective()
    half = [part.bfloat16() for part in (A, B, C, D)]
    y, _ = mamba_ssm.selective_scan(
        x.bfloat16(), dt, *half[:3], D=half[3], return_final_state=False
    )
    assert y.dtype == torch.bfloat16


def test_final_states_of_mamba_1_have_no_gradient(monkeypatch):
    (x, *others), _ = selective()
    with pytest.raises(ValueError, match="return_final_state where gradients are taken"):
        mamba_ssm.selective_scan(x.requires_grad_(), *others)


@needs_oracle
def test_arguments_are_those_of_the_package():
    found = [combined.mamba_chunk_scan_combined, interface.selective_scan_fn]
    for name, function in zip((COMBINED, SELECTIVE), found, strict=True):
        recorded = signature(name).parameters.values()
        assert record_of(function) == [(each.name, each.kind, each.default) for each in recorded]


@needs_oracle
def test_numbers_of_the_reference_of_mamba_1(monkeypatch):
    monkeypatch.setattr(interface, "selective_scan_fn", interface.selective_scan_ref)
    tensors, D = selective()
    assert_close(mamba_ssm.selective_scan(*tensors, D=D), selective_recurrence(*tensors, D=D))


@needs_oracle
def test_numbers_of_the_reference_of_mamba_2(monkeypatch):
    def reference(x, dt, A, B, C, *, chunk_size, D, **others):
        assert not any(value is not None and value is not False for value in others.values())
        return combined.ssd_chunk_scan_combined_ref(x, dt, A, B, C, chunk_size, D=D)

    place(monkeypatch, COMBINED, reference)
    tensors, D, _ = drawn(length=32)
    y, _ = mamba_ssm.ssd_chunk_scan(*tensors, D=D, chunk_size=16, return_final_state=False)
    assert_close(y, ssd_recurrence(*tensors, D=D)[0], rtol=1e-4, atol=1e-4)
