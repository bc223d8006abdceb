"""Shards of any size, padding and 16-bit weights step as whole parameters do."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

from megablocks_core.groups import Group, Mesh
from megablocks_core.parallel import ShardedOptimizer, StochasticRounding, clip_grad_norm_
from megablocks_core.testing import ranks

ADAMW = torch.optim.AdamW


def _world():
    return Group.of(dist.group.WORLD)


class _Scale(nn.Module):
    """A parameter of ``numel`` elements whose gradient is ``factor``, each its own."""

    def __init__(self, *shape, dtype=torch.float64):
        super().__init__()
        values = torch.linspace(-1, 1, max(1, torch.Size(shape).numel()), dtype=torch.float64)
        self.scale = nn.Parameter(values.view(shape).to(dtype))

    def forward(self, factor):
        return (self.scale * factor).sum()


def _factor(module, step, rank, size):
    """Gradients that differ by element, step and rank."""
    index = torch.arange(module.scale.numel(), dtype=torch.float64).view(module.scale.shape)
    return (index + step + rank).cos().to(module.scale.dtype) / size


@ranks(4)
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids="-".join)
def test_f_059_nine_elements_and_one_on_four_ranks(options):
    group = _world()
    for shape in ((9,), (1,), (), (3, 3)):
        module, twin = _Scale(*shape), _Scale(*shape)
        optimizer = ShardedOptimizer(module, ADAMW, group=group, reduction="sum", **options)
        peer = ADAMW(twin.parameters(), **options)
        for step in range(3):
            for one in (optimizer, peer):
                one.zero_grad()
            module(_factor(module, step, group.rank, group.size)).backward()
            for rank in range(group.size):
                twin(_factor(twin, step, rank, group.size)).backward()
            norms = clip_grad_norm_(module, 0.3), clip_grad_norm_(twin, 0.3)
            assert_close(*norms, rtol=1e-12, atol=0)
            optimizer.step()
            peer.step()
        assert_close(module.scale, twin.scale, rtol=0, atol=1e-10)
        saved = optimizer.state_dict()
        other = ShardedOptimizer(_Scale(*shape), ADAMW, group=group, **options)
        other.load_state_dict(saved)
        assert len(other.state) == 1


@ranks(2, 4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_follow_float32_training(dtype):
    group = _world()
    module, twin = _Scale(37, dtype=dtype), _Scale(37, dtype=torch.float32)
    with torch.no_grad():
        twin.scale.copy_(module.scale)
    optimizer = ShardedOptimizer(module, ADAMW, group=group, lr=1e-3, reduction="sum")
    peer = ADAMW(twin.parameters(), lr=1e-3)
    for step in range(20):
        factors = [_factor(module, step, rank, group.size) for rank in range(group.size)]
        module(factors[group.rank]).backward()
        twin.scale.grad = torch.stack(factors).float().sum(0)
        optimizer.step()
        peer.step()
    assert_close(module.scale, twin.scale.to(dtype), rtol=0, atol=0)


@ranks(2)
def test_weights_that_were_loaded_later_are_what_is_stepped():
    group = _world()
    for masters in (True, StochasticRounding()):
        module = _Scale(8, dtype=torch.bfloat16)
        optimizer = ShardedOptimizer(
            module, torch.optim.SGD, group=group, masters=masters, lr=1.0, reduction="sum"
        )
        with torch.no_grad():
            module.load_state_dict({"scale": torch.full((8,), 4.0)})
        module(torch.ones(8, dtype=torch.bfloat16)).backward()
        optimizer.step()
        assert module.scale.tolist() == [2.0] * 8


@ranks(4)
def test_stochastic_rounding_keeps_replicas_equal_for_100_steps_and_the_mean():
    group, replicate = Mesh(dp=4).split("dp", inner=2)
    module = _Scale(500, dtype=torch.bfloat16)
    nn.init.ones_(module.scale)
    optimizer = ShardedOptimizer(
        module,
        torch.optim.SGD,
        group=group,
        replicate=replicate,
        masters=StochasticRounding(seed=5),
        reduction="sum",
        lr=2.0**-12,
        bucket_bytes=400,
    )
    for step in range(100):
        module(torch.full((500,), 0.25, dtype=torch.bfloat16)).backward()
        optimizer.step()
        if step % 20 == 19:
            first, *others = _world().all_gather(module.scale.detach())
            assert all(torch.equal(first, other) for other in others)
    moved = 1 - module.scale.float()
    # Below half of the distance to a neighbour, so rounding to the nearest would stay at 1.
    assert 2.0**-12 < 2.0**-9 / 2
    expected = 100 * 2.0**-12
    assert abs(moved.mean() - expected) < 5 * moved.std() / 500**0.5
    assert moved.unique().numel() > 3


@ranks(2)
def test_hyperparameters_are_read_at_each_step():
    group = _world()
    module = _Scale(6)
    optimizer = ShardedOptimizer(module, torch.optim.SGD, group=group, lr=1.0, reduction="sum")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    before = module.scale.detach().clone()
    for _ in range(3):
        module(torch.ones(6, dtype=torch.float64)).backward()
        optimizer.step()
        schedule.step()
    assert torch.equal(module.scale, before - 2 * (1 + 0.5 + 0.25))
    rate = torch.tensor(0.5)
    optimizer.param_groups[0]["lr"] = rate
    rate.fill_(2.0)
    module(torch.ones(6, dtype=torch.float64)).backward()
    optimizer.step()
    assert torch.equal(module.scale, before - 2 * (1 + 0.5 + 0.25) - 4)
