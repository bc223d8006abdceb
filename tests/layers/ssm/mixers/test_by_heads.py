"""Which rows of packed weights belong to a rank's heads, and which choices are refused."""

import pytest
import torch

from megablocks_core.groups import LOCAL, Group
from megablocks_core.layers.ssm.mixers.by_heads import Part, check_context, rows_of_heads
from tests.layers.ssm.mixers.kinds import build

PARTS = (Part(4, 2), Part(1, 3))


def test_rows_are_those_of_own_heads_and_of_their_groups():
    rows = torch.arange(11)
    for rank, expected in ((0, [0, 1, 2, 3, 8, 9, 10]), (1, [4, 5, 6, 7, 8, 9, 10])):
        assert rows_of_heads(rows, PARTS, Group((0, 1), rank=rank)).tolist() == expected
    assert torch.equal(rows_of_heads(rows, PARTS, LOCAL), rows)


def test_ranks_of_one_group_are_neighbours():
    rows, parts = torch.arange(8), (Part(4, 1), Part(2, 2))
    four = [rows_of_heads(rows, parts, Group((0, 1, 2, 3), rank=rank)) for rank in range(4)]
    assert [own.tolist() for own in four] == [[0, 4, 5], [1, 4, 5], [2, 6, 7], [3, 6, 7]]


def test_gradients_of_shared_rows_are_parts_of_the_sum():
    taps = torch.ones(11, 2, requires_grad=True)
    for rank in range(2):
        rows_of_heads(taps, PARTS, Group((0, 1), rank=rank)).sum().backward()
    assert taps.grad[:8].eq(1).all() and taps.grad[8:].eq(2).all()


@pytest.mark.parametrize(
    ("context", "num_heads", "message"),
    [
        ("tokens", 4, "context='tokens' must be 'states' or 'heads'"),
        ("heads", 6, "num_heads=6 must divide evenly over tp times cp, 2 x 2 ranks"),
    ],
)
def test_bad_choices_raise(context, num_heads, message):
    pair = Group((0, 1))
    check_context("heads", 4, tp=pair, cp=pair)
    check_context("states", 6, tp=pair, cp=pair)
    with pytest.raises(ValueError, match=message):
        check_context(context, num_heads, tp=pair, cp=pair)


@pytest.mark.parametrize("kind", ["Mamba2", "GatedDeltaNet"])
def test_mixers_refuse_an_unknown_context(kind):
    with pytest.raises(ValueError, match="context='rings'"):
        build(kind, context="rings")
