"""Norms over all heads equal one process's, also where ranks hold the same heads."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

from megablocks_core.groups import Mesh, Segment, reduce_from
from megablocks_core.layers import RMSNorm
from megablocks_core.layers.attention.projection_norm import ProjectionNorm, normalise
from megablocks_core.parallel import ColumnParallelLinear, column_linears
from megablocks_core.testing import assert_parallel_equivalence, ranks
from tests.traffic import Traffic

F64 = torch.float64
X = torch.randn(5, 6, dtype=F64, generator=torch.Generator().manual_seed(0))


class _Normalised(nn.Module):
    """Four heads and two, both normalised; each of the four meets its one of the two."""

    def __init__(self, group):
        super().__init__()
        segments = (Segment(8, parts=min(2, group.size)),)
        self.wide = ColumnParallelLinear(6, 16, bias=False, group=group)
        self.narrow = ColumnParallelLinear(6, 8, bias=False, segments=segments, group=group)
        self.wide_norm = ProjectionNorm(16, eps=1e-3, group=group)
        self.narrow_norm = ProjectionNorm(8, eps=1e-3, segments=segments, group=group)
        self.group = group

    def forward(self, x):
        narrow, wide = column_linears(x, self.narrow, self.wide)
        wide, narrow = normalise((self.wide_norm, wide), (self.narrow_norm, narrow))
        wide, narrow = (y.unflatten(-1, (-1, 4)) for y in (wide, narrow))
        both = wide * narrow.repeat_interleave(wide.shape[-2] // narrow.shape[-2], -2)
        return reduce_from(both.sin().sum(), group=self.group)


@ranks(1, 2, 4)
def test_it_equals_one_process():
    group = Mesh(tp=dist.get_world_size()).group("tp")
    assert_parallel_equivalence(_Normalised, X, group=group, loss=lambda y: y)


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
def test_over_one_rank_it_is_a_plain_norm(dtype):
    norm, plain = ProjectionNorm(6, eps=1e-2, dtype=dtype), RMSNorm(6, eps=1e-2, dtype=dtype)
    weight = torch.arange(6.0).to(dtype)
    norm.weight.data.copy_(weight)
    plain.weight.data.copy_(weight)
    (y,) = normalise((norm, X.to(dtype)))
    assert_close(y, plain(X.to(dtype)))


@ranks(4)
def test_two_norms_share_a_message_each_way():
    module = _Normalised(Mesh(tp=4).group("tp"))
    x = X.float()
    wide, narrow = module.wide(x).detach(), module.narrow(x).detach()
    pairs = [
        (norm, value.requires_grad_())
        for norm, value in ((module.wide_norm, wide), (module.narrow_norm, narrow))
    ]
    with Traffic() as forward:
        results = normalise(*pairs)
    assert forward.totals() == {"all_reduce": (1, 2 * 5)}
    with Traffic() as backward:
        torch.cat(results, -1).sin().sum().backward()
    assert backward.totals() == {"all_reduce": (2, 2 * 5 + 2 * 4)}
