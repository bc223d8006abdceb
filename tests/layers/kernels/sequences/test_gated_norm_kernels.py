"""Kernels of the gated norm compile for each architecture with what they are launched with."""

import pytest
import torch

from megablocks_core.layers.kernels.sequences import gated_norm as launches
from tests.layers.kernels.sequences.compiled import (
    EVERY_ARCHITECTURE,
    EVERY_DTYPE,
    assert_compiles,
    noted,
)


@pytest.mark.parametrize(
    "group_size", [512, *(pytest.param(each, marks=pytest.mark.slow) for each in (4096, 16384))]
)
@EVERY_DTYPE
@EVERY_ARCHITECTURE
def test_every_launch_compiles(monkeypatch, compile_for, architecture, dtype, group_size):
    y = torch.zeros(8, 16384, dtype=dtype, requires_grad=True)

    def call():
        given = {"group_size": group_size, "eps": 1e-5, "norm_before_gate": False}
        out = launches.gated_rms_norm(y, y.detach(), torch.zeros(16384), **given)
        torch.autograd.grad(out, y, torch.zeros_like(y))

    launched = noted(monkeypatch, launches, call)
    assert len(launched) == 2
    assert_compiles(launched, compile_for, architecture)
