"""Specs of state-space blocks refuse sizes that make no block."""

import math

import pytest

from megablocks_core.layers import DeltaSpec, Mamba1Spec, Mamba2Spec

MAMBA1 = {"inner_size": 8, "state_size": 4, "dt_rank": 2}
MAMBA2 = {"num_heads": 4, "head_dim": 2, "state_size": 4, "num_groups": 2}
DELTA = {"num_key_heads": 2, "num_value_heads": 4, "key_dim": 3, "value_dim": 5}


def test_norm_groups_follow_the_groups_unless_they_are_given():
    assert Mamba2Spec(**MAMBA2).norm_groups == 2
    assert Mamba2Spec(**MAMBA2, norm_groups=1).norm_groups == 1


def test_a_range_of_steps_is_a_pair_of_floats():
    spec = Mamba2Spec(**MAMBA2, time_step_limit=[0, math.inf])
    assert spec.time_step_limit == (0.0, math.inf)
    assert hash(spec) == hash(Mamba2Spec(**MAMBA2))


@pytest.mark.parametrize(
    ("kind", "sizes", "name", "value"),
    [(Mamba1Spec, MAMBA1, name, 0) for name in (*MAMBA1, "conv_kernel")]
    + [(Mamba2Spec, MAMBA2, name, 0) for name in (*MAMBA2, "conv_kernel", "chunk_size")]
    + [(DeltaSpec, DELTA, name, 0) for name in (*DELTA, "conv_kernel")]
    + [
        (Mamba2Spec, MAMBA2, "num_groups", 3),
        (Mamba2Spec, MAMBA2, "norm_groups", 0),
        (Mamba2Spec, MAMBA2, "norm_groups", 3),
        (Mamba2Spec, MAMBA2, "time_step_limit", (1.0, 1.0)),
        (Mamba2Spec, MAMBA2, "time_step_limit", (-1.0, 1.0)),
        (DeltaSpec, DELTA, "num_key_heads", 3),
    ],
)
def test_what_makes_no_block_is_named(kind, sizes, name, value):
    with pytest.raises(ValueError, match=f"^{name}="):
        kind(**{**sizes, name: value})


@pytest.mark.parametrize("size", [2.5, True, "2", None])
def test_sizes_are_whole_numbers(size):
    for build, name in (
        (lambda: Mamba2Spec(size, 8, 8), "num_heads"),
        (lambda: Mamba2Spec(4, 8, 8, norm_groups=size or 0), "norm_groups"),
        (lambda: DeltaSpec(2, 4, size, 4), "key_dim"),
    ):
        with pytest.raises(ValueError, match=f"^{name}="):
            build()


@pytest.mark.parametrize("limit", [3, (1,), ("a", "b"), None, (float("nan"), 1.0)])
def test_a_limit_is_two_numbers(limit):
    with pytest.raises(ValueError, match="^time_step_limit="):
        Mamba2Spec(4, 8, 8, time_step_limit=limit)
