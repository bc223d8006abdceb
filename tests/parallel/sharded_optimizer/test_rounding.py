"""Rounding by chance keeps the mean, and depends on the element's place in the whole alone."""

import pytest
import torch

from megablocks_core.groups import Group, Segment, ShardSpec, own_slices
from megablocks_core.parallel.counter import as_word, bits_of
from megablocks_core.parallel.sharded_optimizer.rounding import (
    Rounding,
    logical_index,
    round_by_chance,
)

KINDS = [torch.bfloat16, torch.float16]


def _rounded(x, dtype, *, times):
    """Each value ``times`` times, each time by other bits."""
    index = torch.arange(times * len(x))
    bits = bits_of(as_word(7, torch.device("cpu")), index)
    return round_by_chance(x.repeat(times), bits, dtype).view(times, len(x))


@pytest.mark.parametrize("dtype", KINDS)
def test_the_mean_is_kept_and_only_neighbours_are_taken(dtype):
    torch.manual_seed(0)
    # Of every size: normal, subnormal in float16, and below the smallest.
    x = torch.randn(300) * 10.0 ** torch.linspace(-9, 4, 300)
    times = 4000
    rounded = _rounded(x, dtype, times=times).double()
    low, high = rounded.min(0).values, rounded.max(0).values
    near = x.to(dtype).double()
    assert (((near == low) | (near == high)) & (low <= high)).all()
    assert ((low <= x) & (x <= high)).float().mean() > 0.95  # some chances are below 1 / times
    spread = (high - low) / 2 / times**0.5
    error = (rounded.mean(0) - x).abs()
    assert (error <= 5 * spread + 1e-3 * (high - low) + (low == high) * (near - x).abs()).all()
    assert (low < high).float().mean() > 0.8


@pytest.mark.parametrize("dtype", KINDS)
def test_what_the_dtype_has_and_what_is_no_number_stay(dtype):
    x = torch.tensor([0.0, -0.0, 1.0, -1.5, torch.inf, -torch.inf, torch.nan, 3.4e38])
    rounded = _rounded(x, dtype, times=50)
    expected = x.to(dtype).expand(50, -1)
    assert torch.equal(rounded.isnan(), expected.isnan())
    numbers = ~expected.isnan()[:, :-1]
    assert torch.equal(rounded[:, :-1][numbers], expected[:, :-1][numbers])
    assert torch.equal(rounded.signbit()[:, 1], torch.ones(50, dtype=torch.bool))


def test_chance_changes_with_the_step_the_name_the_seed_and_the_place():
    x = torch.full((1000,), 1.001)
    first = _round(x, "a", seed=0, step=1)
    assert torch.equal(first, _round(x, "a", seed=0, step=1))
    for other in (
        _round(x, "a", seed=0, step=2),
        _round(x, "b", seed=0, step=1),
        _round(x, "a", seed=1, step=1),
    ):
        assert not torch.equal(first, other)
    assert first.unique().numel() == 2


def test_ranges_of_a_cut_parameter_round_as_the_whole_does():
    whole = torch.randn(8, 6)
    expected = _round(whole, "w", seed=3, step=9).view(8, 6)
    for rank in range(2):
        group = Group((0, 1), rank=rank)
        specs = (ShardSpec(1, group, (Segment(2), Segment(4))), ShardSpec(0, group))
        mine, theirs = torch.empty(4, 3), torch.empty(4, 3)
        for box, local in own_slices(specs, (8, 6)):
            mine[local], theirs[local] = whole[box], expected[box].float()
        rounding = Rounding("w", (4, 3), specs, seed=3)
        for start, stop in ((0, 5), (5, 12)):
            part = torch.empty(stop - start, dtype=torch.bfloat16)
            rounding.round_(part, mine.view(-1)[start:stop], start=start, step=9)
            assert torch.equal(part.float(), theirs.view(-1)[start:stop])


def test_the_place_of_each_element_in_the_whole():
    group = Group((0, 1), rank=1)
    specs = (ShardSpec(1, group, (Segment(2), Segment(4))),)
    index = logical_index(torch.arange(6), (2, 3), specs)
    assert index.tolist() == [1, 4, 5, 7, 10, 11]
    assert logical_index(torch.arange(1), (), ()).tolist() == [0]


def _round(x, name, *, seed, step):
    target = torch.empty(x.numel(), dtype=torch.bfloat16)
    rounding = Rounding(name, tuple(x.shape), (), seed=seed)
    rounding.round_(target, x.reshape(-1), start=0, step=step)
    return target
