"""Multiply-adds over blocks of tokens are those of the whole, and keep the inputs alone."""

import pytest
import torch
from torch.testing import assert_close

from megablocks_core.layers.ssm.functions.convolution import taps
from megablocks_core.parallel import SequenceCut

LENGTHS = [[15], [16], [17], [33], [16, 16], [15, 2, 16], [17, 20], [31, 1, 1, 1], [0]]


def _plain(x, carry, weight, bias, places, activation):
    """Token by token: the sum over what its window holds of its document."""
    rows = torch.cat((carry, x), dim=1)
    width = weight.shape[1]
    outputs = [bias.expand(len(x), 1, -1)[:, :0]]
    for token, place in enumerate([None] * x.shape[1] if places is None else places.tolist()):
        kept = range(width if place is None else min(place + 1, width))
        parts = [rows[:, width - 1 + token - d] * weight[:, width - 1 - d] for d in kept]
        outputs.append((bias + sum(parts))[:, None])
    y = torch.cat(outputs, dim=1)
    return torch.nn.functional.silu(y) if activation else y


@pytest.mark.parametrize("activation", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_blocks_are_put_together(monkeypatch, lengths, activation):
    """Lengths around a block's, documents that begin at, before and behind its edge."""
    torch.manual_seed(0)
    monkeypatch.setattr(taps, "BLOCK", 0)  # the least: 16 tokens
    places = None
    if len(lengths) > 1:
        sums = torch.tensor([0, *lengths]).cumsum(0)
        places = SequenceCut(sum(lengths), cu_seqlens=sums).positions
    shapes = ((2, sum(lengths), 3), (2, 3, 3), (3, 4), (3,))
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    ys = (
        taps.convolve(*leaves, places=places, activation=activation),
        _plain(*leaves, places, activation),
    )
    options = {"allow_unused": True, "materialize_grads": True}
    results = [(y, *torch.autograd.grad(y.sin().sum(), leaves, **options)) for y in ys]
    for ours, right in zip(*results, strict=True):
        assert_close(ours, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_have_the_dtypes_of_what_they_are_of(dtype):
    leaves = [torch.randn(shape, dtype=dtype) for shape in ((1, 40, 8), (1, 3, 8), (8, 4), (8,))]
    ours = [leaf.clone().requires_grad_() for leaf in leaves]
    exact = [leaf.double().requires_grad_() for leaf in leaves]
    for tensors in (ours, exact):
        taps.convolve(*tensors, activation=True).sum().backward()
    # A sum over 40 tokens in the short dtype would be off by several of its last places.
    tolerance = 1e-5 if dtype == torch.float32 else 2**-8
    for one, right in zip(ours, exact, strict=True):
        assert one.grad.dtype == dtype
        assert_close(one.grad.double(), right.grad, rtol=tolerance, atol=tolerance)


def test_inputs_alone_are_saved():
    x, weight = torch.randn(2, 50, 3, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    before, saved = x.detach().clone(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = taps.convolve(x, torch.zeros(2, 3, 3), weight, None, activation=True)
    y.sum().backward()
    assert_close(x.detach(), before, rtol=0, atol=0)
    large = [t for t in saved if t.numel() >= x.numel()]
    assert [t.data_ptr() for t in large] == [x.data_ptr()]
