"""The gated norm is that of the whole, whatever ranks and groups."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import silu
from torch.testing import assert_close

from megablocks_core.groups import LOCAL, Group, Mesh, gather_from
from megablocks_core.layers.ssm.mixers import GatedRMSNorm
from megablocks_core.layers.ssm.mixers.gated_norm import gated
from megablocks_core.testing import assert_parallel_equivalence, ranks
from tests.layers.ssm.mixers.kinds import loss, tokens
from tests.traffic import Traffic


@pytest.mark.parametrize("norm_before_gate", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_it_is_the_formula(groups, norm_before_gate):
    norm = _norm(LOCAL, groups=groups, norm_before_gate=norm_before_gate)
    y, z = tokens(5, 12), tokens(5, 12).cos()
    x = y if norm_before_gate else y * silu(z)
    parts = x.view(5, groups, -1)
    expected = (parts / (parts.square().mean(-1, keepdim=True) + 0.1).sqrt()).view(5, 12)
    expected = expected * norm.weight * (silu(z) if norm_before_gate else 1)
    assert_close(norm(y, z), expected)


@ranks(1, 2, 4)
def test_groups_may_span_ranks_or_end_inside_one():
    tp = Mesh(tp=dist.get_world_size()).group("tp")
    for groups in (1, 2, 3, 4, 6):
        for norm_before_gate in (False, True):
            assert_parallel_equivalence(
                lambda group, groups=groups, order=norm_before_gate: _norm(
                    group, groups=groups, norm_before_gate=order
                ),
                (tokens(5, 12), tokens(5, 12).cos()),
                group=tp,
                loss=loss,
                split=lambda pair: tuple(x.chunk(tp.size, dim=-1)[tp.rank] for x in pair),
                join=lambda y: gather_from(y, dim=-1, group=tp),
            )


@ranks(2)
def test_only_groups_that_span_ranks_cost_a_message():
    tp = Mesh(tp=2).group("tp")
    for groups, messages in ((2, {}), (4, {}), (1, {"all_reduce": [5]}), (3, {"all_reduce": [15]})):
        y = tokens(5, 6).requires_grad_()
        with Traffic() as forward:
            out = _norm(tp, groups=groups)(y, tokens(5, 6))
        with Traffic() as backward:
            out.sum().backward()
        assert forward.sizes == backward.sizes == messages, groups


def test_16_bits_are_normalised_in_float32():
    y, z = (x.to(torch.bfloat16) for x in (tokens(5, 12), tokens(5, 12).cos()))
    norm = GatedRMSNorm(12, groups=2, dtype=torch.bfloat16)
    expected = GatedRMSNorm(12, groups=2)(y.float(), z.float()).to(torch.bfloat16)
    assert torch.equal(norm(y, z), expected)
    assert torch.equal(gated(y, z), (y.float() * silu(z.float())).to(torch.bfloat16))


def test_features_must_divide():
    with pytest.raises(ValueError, match="groups=5 must divide features=12"):
        GatedRMSNorm(12, groups=5)
    with pytest.raises(ValueError, match="features=9 must divide evenly over a group of 2"):
        GatedRMSNorm(9, tp=Group((0, 1)))


def _norm(tp, **options):
    norm = GatedRMSNorm(12, eps=0.1, tp=tp, dtype=torch.float64, **options)
    with torch.no_grad():
        own = slice(norm.weight.numel() * tp.rank, norm.weight.numel() * (tp.rank + 1))
        norm.weight.copy_(torch.arange(1.0, 13.0)[own])
    return norm
