"""The selective scan: known values, published references, long decays, wrong arguments.

That it is its recurrence, also over documents and ranks, is tested in ``chunked``.
"""

import pytest
import torch
from torch.nn.functional import softplus
from torch.testing import assert_close

from megablocks_core.layers.ssm import selective_scan
from megablocks_core.layers.ssm.functions.recurrences import selective_recurrence
from tests.layers.ssm.mamba_ssm_oracle import mamba_ssm
from tests.parallel import wrong_arguments as no


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 4])
def test_f085_an_exact_small_recurrence(chunk_size):
    """Confirmed: log 2 times (1, 3/2, 7/4), as fractions of a state that halves."""
    x, ones = torch.ones(1, 3, 1), torch.ones(1, 3, 1)
    dt, A, D = torch.full((1, 3, 1), 2.0).log(), -torch.ones(1, 1), torch.zeros(1)
    right = torch.tensor([0.6931472, 1.0397208, 1.2130076]).view(1, 3, 1)
    y, state = selective_scan(x, dt, A, ones, ones, D=D, chunk_size=chunk_size)
    assert_close(y, right, rtol=0, atol=1e-6)
    assert state is not None and abs(state.item() - 1.2130076) < 1e-6
    assert_close(selective_recurrence(x, dt, A, ones, ones, D=D)[0], right, rtol=0, atol=1e-6)


def _inputs(length, channels=4, states=3, dtype=torch.float32):
    torch.manual_seed(0)
    found = [
        torch.randn(1, length, channels),
        softplus(torch.randn(1, length, channels) - 2),
        -torch.rand(channels, states).exp(),
        torch.randn(1, length, states),
        torch.randn(1, length, states),
    ]
    return [x.to(dtype) for x in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_rows_with_strong_and_weak_decays(dtype):
    """65,536 tokens: channels that forget at once, in 1,000 tokens, and never."""
    rates = torch.tensor([[1e4], [1.0], [1e-3], [0.0]]) * torch.tensor([[1.0, 2.0, 0.5]])
    x, dt, _, B, C = _inputs(65536)
    given = [x.to(dtype), dt.to(dtype), -rates, B.to(dtype), C.to(dtype)]
    given = [part.requires_grad_() for part in given]
    wide = [part.detach().double().requires_grad_() for part in given]
    results = []
    for inputs in (given, wide):
        y, final = selective_scan(*inputs)
        assert final is not None
        grads = torch.autograd.grad(y.sum() / 256, inputs)
        results.append((y, final, *grads))
    for ours, right in zip(*results, strict=True):
        assert ours.isfinite().all()
        tolerance = 1e-4 if ours.dtype == torch.float32 else 1e-2
        assert (ours.double() - right).norm() < tolerance * right.norm()


def test_it_is_the_published_reference():
    reference = mamba_ssm("ops.selective_scan_interface")
    if reference is None:
        pytest.skip("mamba_ssm is not installed")
    x, dt, A, B, C = _inputs(37)
    D = torch.randn(4)
    y, state = selective_scan(x, dt, A, B, C, D=D)
    turned = [part.mT for part in (x, dt)]
    right, last = reference.selective_scan_ref(*turned, A, B.mT, C.mT, D=D, return_last_state=True)
    assert_close(y, right.mT, rtol=1e-5, atol=1e-5)
    assert_close(state, last, rtol=1e-5, atol=1e-5)


def test_it_is_what_transformers_computes():
    modeling = pytest.importorskip("transformers.models.mamba.modeling_mamba")
    x, dt, A, B, C = _inputs(37)
    D = torch.randn(4)
    turned = [part.mT for part in (x, dt)]
    right, last = modeling.mamba_selective_scan(*turned, A, B.mT, C.mT, D=D, return_last_state=True)
    y, state = selective_scan(x, dt, A, B, C, D=D)
    assert_close(y, right.mT, rtol=1e-5, atol=1e-5)
    assert_close(state, last, rtol=1e-5, atol=1e-5)


def test_wrong_arguments_are_refused():
    names = ("x", "dt", "A", "B", "C")
    right = dict(zip(names, _inputs(8), strict=True))
    wrong = {
        "x": (torch.zeros(8, 4), torch.zeros(1)),
        "dt": (torch.zeros(1, 8, 1), torch.zeros(1, 7, 4), torch.zeros(8, 4)),
        "A": (torch.zeros(4), torch.zeros(3, 3)),
        "B": (torch.zeros(1, 8, 2), torch.zeros(1, 8, 1, 3), torch.zeros(1, 9, 3)),
        "C": (torch.zeros(1, 8, 2), torch.zeros(2, 8, 3)),
        "D": (torch.zeros(3), torch.zeros(4, 3)),
        "chunk_size": (0, -1),
        "initial_state": (torch.zeros(1, 4, 2), torch.zeros(2, 4, 3)),
        "cu_seqlens": (torch.tensor([0, 9]), torch.tensor([1, 8]), torch.zeros(3)),
    }
    no.refused(selective_scan, right, wrong, besides=("cut", "return_final_state"))
