"""All ranks know who holds which columns, and hear of whatever does not fit."""

import pytest
import torch
import torch.distributed as dist

from megablocks_core.groups import Group, chunk_slice
from megablocks_core.parallel.tensor.vocabulary import Columns, agree_on_columns
from megablocks_core.testing import ranks


def _agree(width, *, vocab_size=None, group, indices=(0,), counts=None, rows=None):
    indices = torch.tensor(indices)
    rows = torch.randn(width, 3) + group.rank if rows is None else rows
    counts = torch.ones_like(indices, dtype=torch.bool) if counts is None else counts
    return agree_on_columns(
        rows, indices, counts, vocab_size=vocab_size, group=group, names=("rows", "ids")
    )


@ranks(1, 2, 4)
@pytest.mark.parametrize("whole", [16, 13, 5])
def test_cuts_by_the_rule_of_chunk(whole):
    group = Group.of(dist.group.WORLD)
    own = chunk_slice(whole, group.size, group.rank)
    width, widest = own.stop - own.start, -(-whole // group.size)
    for vocab_size in (None, whole):
        columns = _agree(width, vocab_size=vocab_size, group=group)
        assert columns == Columns(min(own.start, whole), width, widest, whole)


@ranks(2)
def test_any_cut_without_a_size_and_equal_padded_shares_with_one():
    group = Group.of(dist.group.WORLD)
    first, own = ((0, 1), (1, 6))[group.rank]
    assert _agree((1, 6)[group.rank], group=group) == Columns(first, own, 6, 7)
    first, own = ((0, 8), (8, 1))[group.rank]
    assert _agree(8, vocab_size=9, group=group) == Columns(first, own, 8, 9)
    first, own = ((0, 4), (4, 0))[group.rank]
    assert _agree(4, vocab_size=4, group=Group()) == Columns(0, 4, 4, 4)
    for width, vocab_size in ((4, 4), (4, 9), (5 + group.rank, 9)):
        with pytest.raises(ValueError, match="rows has .* rows on the ranks of the group"):
            _agree(width, vocab_size=vocab_size, group=group)
    group.barrier()


@ranks(2)
def test_indices_are_compared_where_they_count():
    group = Group.of(dist.group.WORLD)
    last = torch.tensor([True, False])
    assert _agree(2, group=group, indices=(3, 99 * group.rank), counts=last).whole == 4
    for indices, counts, match in (
        ((0, 4), None, "ids must lie in the vocabulary of 4 entries; found 4"),
        ((0, -2 * group.rank), None, "ids must lie in the vocabulary of 4 entries; found -2"),
        ((0, group.rank), None, "ids must be equal on all ranks"),
        # An index that counts on one rank alone, though it is 0.
        ((0, 0), torch.tensor([True, group.rank == 0]), "ids must be equal on all ranks"),
        ((group.rank, 1 - group.rank), None, "ids must be equal on all ranks"),
    ):
        with pytest.raises(ValueError, match=match):
            _agree(2, group=group, indices=indices, counts=counts)
    group.barrier()


@ranks(2)
def test_equal_rows_are_whole_already_unless_they_say_nothing():
    group = Group.of(dist.group.WORLD)
    rows = torch.arange(12.0).view(4, 3)
    with pytest.raises(ValueError, match="rows must be this rank's share"):
        _agree(4, group=group, rows=rows)
    assert _agree(4, group=group, rows=rows, vocab_size=8).whole == 8
    for silent in (torch.zeros(4, 3), torch.full((4, 3), torch.nan), torch.ones(0, 3)):
        assert _agree(0, group=group, rows=silent, indices=()).whole == 2 * len(silent)
    group.barrier()
