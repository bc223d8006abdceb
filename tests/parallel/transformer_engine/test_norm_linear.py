"""A norm and a linear layer in one module are our two, with their names one to one."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megablocks_core.groups import LOCAL, Mesh, Segment, marks
from megablocks_core.layers import LayerNorm, RMSNorm
from megablocks_core.layers.norm import on_part
from megablocks_core.parallel import ColumnParallelLinear
from megablocks_core.parallel.transformer_engine import norm_linear
from megablocks_core.testing import ranks
from tests.parallel.transformer_engine import fake
from tests.parallel.transformer_engine.fake import fixture as fixture

DOUBLE = {"dtype": torch.float64}


class Pair(nn.Module):
    """Our norm, and our linear layer with its own names."""

    def __init__(self, normalization, *, zero_centered, **options):
        super().__init__()
        if normalization == "rms":
            self.norm = RMSNorm(8, eps=1e-4, zero_centered=zero_centered, **DOUBLE)
        else:
            self.norm = LayerNorm(8, eps=1e-4, **DOUBLE)
        self.linear = ColumnParallelLinear(8, 12, **options, **DOUBLE)

    def forward(self, x):
        parts = self.linear.group if self.linear.sequence_parallel else LOCAL
        return self.linear(on_part(self.norm, group=parts)[0](x))

    def named(self):
        return {name.removeprefix("linear."): each for name, each in self.named_parameters()}


def check(normalization, *, seed, zero_centered=False, **options):
    torch.manual_seed(3)
    given = {"normalization": normalization, "eps": 1e-4, "zero_centered": zero_centered}
    theirs = norm_linear(8, 12, **given, **options, **DOUBLE)
    torch.manual_seed(3)
    ours = Pair(normalization, zero_centered=zero_centered, **options)
    held = ours.named()
    assert set(theirs.state_dict()) == set(held)
    assert {name: specs for name, _, specs in marks(theirs)} == {
        name.removeprefix("linear."): specs for name, _, specs in marks(ours)
    }
    torch.manual_seed(4)
    with torch.no_grad():
        for name, each in held.items():
            if name.startswith("norm"):
                theirs.get_parameter(name).copy_(each.copy_(torch.randn(8)))
    torch.manual_seed(seed)
    start = torch.randn(2, 4, 8, **DOUBLE)
    results = []
    for layer, named in ((theirs, dict(theirs.named_parameters())), (ours, held)):
        x = start.clone().requires_grad_()
        y = layer(x)
        y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y))
        grads = {name: each.grad for name, each in named.items()}
        results.append({"y": y.detach(), "x": x.grad, "values": named["weight"], **grads})
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("normalization", ["rms", "layer"])
def test_one_process(te, normalization):
    for bias in (True, False):
        check(normalization, seed=0, bias=bias)
    if normalization == "rms":
        check("rms", seed=0, zero_centered=True)


@ranks(2, 4)
def test_over_ranks():
    group = Mesh(tp=dist.get_world_size()).group("tp")
    segments = (Segment(8), Segment(4, parts=2))
    with fake.installed():
        for normalization in ("rms", "layer"):
            check(normalization, seed=0, group=group)
            check(normalization, seed=group.rank, group=group, sequence_parallel=True)
        check("rms", seed=0, group=group, segments=segments)


def test_an_unknown_norm_is_refused(te):
    with pytest.raises(ValueError, match="normalization='batch' must be"):
        norm_linear(8, 8, normalization="batch")  # pyright: ignore[reportArgumentType]
