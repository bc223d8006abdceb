"""Products over all places at once, batched and ragged, are those of each expert."""

import pytest
import torch
from torch.testing import assert_close

from megablocks_core.layers.moe.experts.whole import Batched, Ragged

COUNTS = {Batched: [4, 4, 4], Ragged: [5, 0, 7]}


@pytest.mark.parametrize("kind", COUNTS)
def test_products_and_biases_of_each_expert(kind):
    counts = COUNTS[kind]
    ends = torch.tensor(counts).cumsum(0).int()
    products = Batched() if kind is Batched else Ragged(ends)
    x, dy = torch.randn(12, 8, dtype=torch.float64), torch.randn(12, 16, dtype=torch.float64)
    weight, bias = torch.randn(3, 16, 8, dtype=torch.float64), torch.randn(3, 16).double()
    forward, backward = products.forward(x, weight), products.input_gradient(dy, weight)
    weights, biases = products.weight_gradient(dy, x, weight), products.bias_gradient(dy, bias)
    added = dy.clone()
    products.add_bias_(added, bias)
    for expert, (end, count) in enumerate(zip(ends.tolist(), counts, strict=True)):
        own = slice(end - count, end)
        assert_close(forward[own], x[own] @ weight[expert].T)
        assert_close(backward[own], dy[own] @ weight[expert])
        assert_close(weights[expert], dy[own].T @ x[own])
        assert_close(biases[expert], dy[own].sum(0))
        assert_close(added[own], dy[own] + bias[expert])
