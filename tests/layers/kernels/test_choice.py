"""Which kernels serve which tensor, and that none is loaded before it is used."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megablocks_core.layers.kernels import choice, kernels_for, triton_serves
from megablocks_core.layers.kernels.plain import Plain


def test_on_a_cpu_the_twins_serve():
    assert isinstance(kernels_for(torch.zeros(2)), Plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_on_cuda_triton_serves(dtype):
    from megablocks_core.layers.kernels.launches import Launches

    assert isinstance(kernels_for(SimpleNamespace(is_cuda=True, dtype=dtype)), Launches)


def test_on_cuda_the_twins_serve_float64_and_where_triton_is_missing(monkeypatch):
    on_cuda = SimpleNamespace(is_cuda=True, dtype=torch.float64)
    assert isinstance(kernels_for(on_cuda), Plain)
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    on_cuda.dtype = torch.bfloat16
    assert isinstance(kernels_for(on_cuda), Plain)


def on_cuda(dtype=torch.float32, count=3):
    """What is asked of a tensor there."""
    return SimpleNamespace(is_cuda=True, dtype=dtype, numel=lambda: count)


def test_sequences_are_served_in_triton_where_every_tensor_is(monkeypatch):
    served = [on_cuda(), on_cuda(torch.bfloat16), None, on_cuda(torch.int64)]
    assert triton_serves(*served)
    for other in (on_cuda(torch.float64), on_cuda(count=0), torch.zeros(2)):
        assert not triton_serves(*served, other)
    with monkeypatch.context() as patched:
        patched.setattr(torch.compiler, "is_compiling", lambda: True)
        assert not triton_serves(*served)
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    assert not triton_serves(*served)


def test_sequences_without_values_are_not_served():
    with FakeTensorMode():
        assert not triton_serves(torch.zeros(2, device="cuda"))


def test_triton_is_not_loaded_where_the_twins_serve():
    code = """
import json, sys, torch
import megablocks_core.layers.kernels as kernels
kernels.kernels_for(torch.zeros(2)).take(torch.zeros(2, 2), torch.tensor([1]))
print(json.dumps("triton" in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) is False
