"""Which kernels serve which tensor, and that none is loaded before it is used."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from megablocks_core.layers.kernels import choice, kernels_for
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
