"""Newton-Schulz drives singular values towards one, on whole matrices and on columns of them."""

import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from megablocks_core.groups import LOCAL, Group
from megablocks_core.parallel.muon.newton_schulz import (
    Columns,
    NewtonSchulz,
    orthogonalize,
    orthogonalize_columns,
)
from megablocks_core.testing import ranks


def _random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _by_singular_values(x, steps=5):
    """The iteration is a polynomial of the singular values and leaves the vectors as they are."""
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    s = s / x.norm()
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ s.diag() @ v


@settings(max_examples=20)
@example(5, 3, 5, 0)
@example(3, 5, 5, 0)
@given(st.integers(1, 7), st.integers(1, 7), st.integers(1, 6), st.integers(0, 99))
def test_it_is_a_polynomial_of_the_singular_values(rows, columns, steps, seed):
    x = _random(rows, columns, seed=seed)
    assert_close(NewtonSchulz(steps=steps)(x), _by_singular_values(x, steps), rtol=0, atol=1e-9)


def test_singular_values_end_near_one():
    values = torch.linalg.svdvals(NewtonSchulz()(_random(8, 20)))
    assert values.min() > 0.6 and values.max() < 1.3


def test_a_stack_is_as_many_matrices():
    x = _random(2, 3, 5, 4)
    done = NewtonSchulz()(x)
    for index in ((0, 1), (1, 2)):
        assert_close(done[index], NewtonSchulz()(x[index]), rtol=0, atol=1e-14)


def test_zeros_stay_zeros():
    assert not NewtonSchulz()(torch.zeros(3, 4)).any()


def test_matrices_of_many_shapes_come_back_in_order():
    shapes = [(3, 5), (5, 3), (3, 5), (0, 4), (1, 1)]
    xs = [_random(*shape, seed=index) for index, shape in enumerate(shapes)]
    for x, done in zip(xs, orthogonalize(xs, NewtonSchulz()), strict=True):
        expected = NewtonSchulz()(x) if x.numel() else x
        assert_close(done, expected, rtol=0, atol=1e-14)


@ranks(1, 2, 4)
def test_columns_over_ranks_are_those_of_the_whole():
    group = Group.of(dist.group.WORLD)
    wholes = [_random(3, 9, seed=1), _random(4, 4, seed=2)]
    # Beside its own slice of the second, every rank holds its first column, which counts once.
    own = [whole.tensor_split(group.size, 1)[group.rank] for whole in wholes]
    twice = torch.cat([wholes[1][:, :1], own[1]], 1)
    counted = torch.arange(1, twice.shape[1])
    done = orthogonalize_columns(
        [Columns(own[0]), Columns(twice, counted)], NewtonSchulz(), [group]
    )
    first, second = (NewtonSchulz()(whole) for whole in wholes)
    assert_close(done[0], first.tensor_split(group.size, 1)[group.rank], rtol=0, atol=1e-12)
    assert_close(done[1][:, :1], second[:, :1], rtol=0, atol=1e-12)
    mine = second.tensor_split(group.size, 1)[group.rank]
    assert_close(done[1][:, 1:], mine, rtol=0, atol=1e-12)


def test_no_columns_are_none():
    assert orthogonalize_columns([], NewtonSchulz(), [LOCAL]) == []


def test_float64_stays_and_others_choose():
    for method, dtypes in (
        (NewtonSchulz(), (torch.float64, torch.float32, torch.float32)),
        (NewtonSchulz(dtype=torch.bfloat16), (torch.float64, torch.bfloat16, torch.bfloat16)),
    ):
        asked = (torch.float64, torch.float32, torch.bfloat16)
        assert tuple(method.dtype_for(dtype) for dtype in asked) == dtypes
