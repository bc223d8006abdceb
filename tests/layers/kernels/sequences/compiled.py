"""Launches of sequences' kernels, noted instead of run, and what their compiled code must be."""

import re

import pytest
import torch

from tests.layers.kernels.compiling import ARCHITECTURES

SLOW = pytest.mark.slow
EVERY_ARCHITECTURE = pytest.mark.parametrize(
    "architecture", [pytest.param(each, marks=[SLOW] * (each != 90)) for each in ARCHITECTURES]
)
EVERY_DTYPE = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, *(pytest.param(each, marks=SLOW) for each in (torch.float32,))]
)


def noted(monkeypatch, module, call):
    """(kernel, grid, arguments, named) of each launch of a module in ``call``."""
    seen = []

    def note(kernel, grid, *arguments, **named):
        seen.append((kernel, grid, arguments, named))

    monkeypatch.setattr(module, "launch", note)
    call()
    return seen


def assert_compiles(launched, compile_for, architecture, *, products=()):
    """Shared memory fits, no atomics add, and some kernels multiply on tensor cores."""
    shared, instruction = ARCHITECTURES[architecture]
    for kernel, grid, arguments, named in launched:
        compiled = compile_for(architecture, kernel, grid, arguments, named)
        ptx = compiled.asm["ptx"]
        assert compiled.asm["cubin"] and f".target sm_{architecture}" in ptx
        assert compiled.metadata.shared <= shared
        assert not re.search(r"\b(atom|red)\.", ptx)
        assert (instruction in ptx) == (kernel in products), kernel
        assert len(arguments) + sum(each.is_constexpr for each in kernel.params) == len(
            kernel.params
        )
        assert max(grid[1:]) < 2**16
