"""Products of ragged groups, in every dtype, layout and width."""

from itertools import pairwise

import pytest
import torch
from torch.testing import assert_close

from megablocks_core.layers.moe.experts.ragged_product import ragged_product

ENDS = torch.tensor([3, 3, 10], dtype=torch.int32)


@pytest.mark.parametrize("width", [5, 8, 16])  # grouped_mm wants rows of a multiple of 16 bytes
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_each_group_has_its_product(dtype, width):
    rows, stack = torch.randn(12, width).to(dtype), torch.randn(3, width, 8).to(dtype)
    dy = torch.randn(12, 8).to(dtype)
    product = ragged_product(rows, stack, ENDS)
    gradient = ragged_product(dy.t(), rows, ENDS)
    assert product.shape == (12, 8) and gradient.shape == (3, 8, width)
    bounds = {"atol": 1e-1, "rtol": 2e-2} if dtype == torch.bfloat16 else {}
    for group, (start, end) in enumerate(pairwise([0, *ENDS.tolist()])):
        assert_close(product[start:end], rows[start:end] @ stack[group], **bounds)
        assert_close(gradient[group], dy[start:end].t() @ rows[start:end], **bounds)
