"""Kernels of the convolution compile for each architecture with what they are launched with."""

import torch

from megablocks_core.layers.kernels.sequences import convolution as launches
from tests.layers.kernels.sequences.compiled import (
    EVERY_ARCHITECTURE,
    EVERY_DTYPE,
    assert_compiles,
    noted,
)


@EVERY_DTYPE
@EVERY_ARCHITECTURE
def test_every_launch_compiles(monkeypatch, compile_for, architecture, dtype):
    x, weight = torch.zeros(2, 512, 1024, dtype=dtype), torch.zeros(1024, 4, dtype=dtype)
    given = (x, x[:, :3].contiguous(), weight, weight[:, 0], torch.zeros(512, dtype=torch.int64))

    def call():
        launches.convolve(*given, activation=True)
        launches.convolve_gradients(*given, activation=True, dy=x)

    launched = noted(monkeypatch, launches, call)
    assert len(launched) == 3
    assert_compiles(launched, compile_for, architecture)
