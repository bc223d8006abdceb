"""The extension's passes over experts' rows agree with their plain twins."""

import pytest
import torch

from megablocks_core.layers.moe.experts import passes_into
from megablocks_core.layers.moe.experts.activations import ACTIVATIONS
from megablocks_core.layers.moe.experts.passes import HiddenGradients
from megablocks_core.layers.moe.experts.passes_into import (
    hidden_backward_into,
    hidden_backward_into_plain,
    hidden_into,
    hidden_into_plain,
)

ROWS, PADDED = 7, 12


@pytest.mark.parametrize("features", (1, 16, 37))
@pytest.mark.parametrize("activation", ("swiglu", "clamped_swiglu"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("weighs", (True, False))
def test_native_passes_agree_with_plain_ones(features, activation, dtype, weighs):
    assert passes_into._native is not None
    chosen = ACTIVATIONS[activation]
    # Wide enough for clamps, and for sigmoids that are all but 0 and 1.
    gate, up = (torch.randn(ROWS, features).mul(20).to(dtype) for _ in "gu")
    dh, weights = torch.randn(PADDED, features).to(dtype), torch.rand(ROWS) if weighs else None
    native, plain = (_blank(features, kind) for kind in (dtype, torch.float64))
    outs = torch.empty(PADDED, features, dtype=dtype), torch.empty(PADDED, features).double()
    wide = [None if x is None else x.double() for x in (dh, gate, up, weights)]
    hidden_into(chosen, gate, up, weights, outs[0])
    hidden_into_plain(chosen, *wide[1:], outs[1])
    hidden_backward_into(chosen, dh, gate, up, weights, native)
    hidden_backward_into_plain(chosen, *wide, plain)
    # A rounding of the argument of an exponential, here up to 100, is one of as many in its value.
    tolerance = 6e-6 if dtype == torch.float32 else 4e-3
    for mine, theirs in zip((*native, outs[0]), (*plain, outs[1]), strict=True):
        assert mine is not None and theirs is not None
        if weighs or mine.dim() > 1:
            assert (mine.double() - theirs).norm() <= tolerance * theirs.norm()
    for mine in (*native[:3], outs[0]):
        assert mine is not None and not mine[ROWS:].any()


def test_threads_do_not_change_the_bits():
    gate, up, dh = (torch.randn(1024, 512) for _ in range(3))
    weights, results = torch.rand(1024), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            made = HiddenGradients(*(torch.empty(1024, 512) for _ in range(3)), torch.empty(1024))
            hidden_backward_into(ACTIVATIONS["swiglu"], dh, gate, up, weights, made)
        finally:
            torch.set_num_threads(1)
        results.append(made)
    for other in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], other, strict=True))


def _blank(features, dtype):
    rows = (torch.empty(PADDED, features, dtype=dtype) for _ in range(3))
    return HiddenGradients(
        *rows, torch.empty(ROWS, dtype=torch.promote_types(dtype, torch.float32))
    )
