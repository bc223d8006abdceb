"""A head's gradients are summed wide and rounded once."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.parallel import head_gradients
from megablocks_core.parallel.head_gradients import RowSums, add_product, product


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
        sums = RowSums(weight, blocks, torch.float32)
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
    assert torch.equal(RowSums(weight, blocks, torch.float32).rounded(), torch.zeros_like(weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_products_are_as_wide_as_what_they_go_into(dtype):
    a, b = torch.randn(3, 4), torch.randn(4, 5).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    out, total = torch.empty(3, 5, dtype=wide), torch.ones(3, 5, dtype=wide)
    product(a.to(wide), b, out=out)
    add_product(total, a.to(wide), b)
    right, put = a.double() @ b.double(), torch.full_like(total, torch.nan)
    add_product(put, a.to(wide), b, fresh=True)
    torch.testing.assert_close(put, out, rtol=0, atol=1e-5)
    torch.testing.assert_close(out.double(), right, rtol=0, atol=1e-5)
    torch.testing.assert_close(total.double(), 1 + right, rtol=0, atol=1e-5)
