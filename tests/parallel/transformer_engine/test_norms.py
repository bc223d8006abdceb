"""Norms of Transformer Engine are those of layers, also on a part of the tokens."""

import copy
import pickle

import pytest
import torch

from megablocks_core.groups import Mesh
from megablocks_core.layers import LayerNorm, RMSNorm
from megablocks_core.layers.norm import on_part
from megablocks_core.parallel.initial import reset_parameters
from megablocks_core.parallel.transformer_engine import layer_norm, rms_norm
from megablocks_core.testing import ranks
from tests.parallel.transformer_engine import fake
from tests.parallel.transformer_engine.fake import fixture as fixture

DOUBLE = {"dtype": torch.float64}
PAIRS = {
    "rms": lambda: (rms_norm(8, **DOUBLE), RMSNorm(8, **DOUBLE)),
    "zero-centred": lambda: (
        rms_norm(8, eps=1e-3, zero_centered=True, **DOUBLE),
        RMSNorm(8, eps=1e-3, zero_centered=True, **DOUBLE),
    ),
    "layer": lambda: (layer_norm(8, **DOUBLE), LayerNorm(8, **DOUBLE)),
}


def results(norm, call, x):
    x = x.detach().clone().requires_grad_()
    norm.zero_grad()
    y = call(x)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y))
    return {"y": y.detach(), "x": x.grad, **{n: p.grad for n, p in norm.named_parameters()}}


@pytest.mark.parametrize("kind", PAIRS)
def test_outputs_and_gradients(te, kind):
    theirs, ours = PAIRS[kind]()
    torch.testing.assert_close(dict(theirs.state_dict()), dict(ours.state_dict()))
    with torch.no_grad():
        for one, other in zip(theirs.parameters(), ours.parameters(), strict=True):
            one.copy_(other.copy_(torch.randn(8)))
    x = torch.randn(2, 3, 8, **DOUBLE)
    expected = results(ours, ours, x)
    torch.testing.assert_close(results(theirs, theirs, x), expected, rtol=1e-10, atol=1e-12)
    for copied in (copy.deepcopy(theirs), pickle.loads(pickle.dumps(theirs))):
        torch.testing.assert_close(results(copied, copied, x), expected, rtol=1e-10, atol=1e-12)


@ranks(2)
def test_on_a_part_of_the_tokens_gradients_are_summed():
    group = Mesh(tp=2).group("tp")
    with fake.installed():
        for make in PAIRS.values():
            theirs, ours = make()
            torch.manual_seed(group.rank)
            x = torch.randn(3, 8, **DOUBLE)
            torch.testing.assert_close(
                results(theirs, on_part(theirs, group=group)[0], x),
                results(ours, on_part(ours, group=group)[0], x),
                rtol=1e-10,
                atol=1e-12,
            )


def test_they_start_at_one_after_meta(te):
    for norm, start in ((rms_norm(4, device="meta"), 1), (layer_norm(4, device="meta"), 1)):
        norm.to_empty(device="cpu")
        reset_parameters(norm, seed=0)
        assert torch.equal(norm.weight, torch.full((4,), float(start)))
    assert torch.equal(rms_norm(4, zero_centered=True).weight, torch.zeros(4))
