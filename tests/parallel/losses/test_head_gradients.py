"""A head's gradients are summed wide and rounded once."""

from unittest.mock import patch

import torch
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.parallel.losses import head_gradients
from megablocks_core.parallel.losses.head_gradients import RowSums
from megablocks_core.parallel.losses.head_products import Products


@given(
    own=st.integers(0, 12),
    padding=st.integers(0, 3),
    width=st.integers(1, 5),
    piece=st.integers(1, 40),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_sums_of_every_block_come_back_whole(own, padding, width, piece, dtype):
    weight = torch.randn(own + padding, 2).to(dtype)
    starts = range(0, max(own, 1), width)
    blocks = [slice(start, min(start + width, own)) for start in starts]
    with patch.object(head_gradients, "_PIECE", piece):
        sums = RowSums(weight, blocks, Products(), torch.float32)
    right = torch.zeros(own + padding, 2)
    for turn in range(3):
        for block in blocks:
            column = torch.full((block.stop - block.start, 1), 2.0 ** (-9 * turn))
            sums.add(block, column, torch.full((1, 2), block.start + 1.0))
            right[block] += column * (block.start + 1.0)
        sums.is_empty = False
    assert all(piece.dtype == torch.float32 for piece in sums.pieces)
    result = sums.rounded()
    assert torch.equal(result, right.to(dtype)) and result.shape == weight.shape
    assert not sums.pieces
    empty = RowSums(weight, blocks, Products(), torch.float32)
    assert torch.equal(empty.rounded(), torch.zeros_like(weight))
