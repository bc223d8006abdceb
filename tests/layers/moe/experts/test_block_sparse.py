"""Products over a block topology are the dense products, in the blocks that it has."""

import torch
from torch.testing import assert_close

from megablocks_core.layers.moe.experts.block_sparse import BLOCK, Topology, dsd, sdd

TOPOLOGY = Topology((2, 0, 1), 2)  # row blocks of three experts; two blocks of features each
HIDDEN, FEATURES = 5, 6


def test_sdd_makes_the_blocks_of_each_rows_expert():
    x = torch.randn(3 * BLOCK, HIDDEN, dtype=torch.float64)
    weight = torch.randn(3, FEATURES, HIDDEN, dtype=torch.float64)
    blocks = sdd(x, weight, TOPOLOGY)
    assert blocks.shape == (3, 2, BLOCK, 3)
    for row, expert in enumerate((0, 0, 2)):
        dense = x[row * BLOCK : (row + 1) * BLOCK] @ weight[expert].T
        assert_close(torch.cat(list(blocks[row]), dim=-1), dense)


def test_dsd_takes_them_back_to_rows():
    values = torch.randn(3, 2, BLOCK, 3, dtype=torch.float64)
    weight = torch.randn(3, HIDDEN, FEATURES, dtype=torch.float64)
    y = dsd(values, weight, TOPOLOGY)
    for row, expert in enumerate((0, 0, 2)):
        hidden = torch.cat(list(values[row]), dim=-1)
        assert_close(y[row * BLOCK : (row + 1) * BLOCK], hidden @ weight[expert].T)
