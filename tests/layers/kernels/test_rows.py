"""Permuting and its adjoint: gradients, the assignment's own rows, and the interpreted kernels."""

import pytest
import torch
from torch.testing import assert_close

from megablocks_core.layers.kernels.plain import Plain
from megablocks_core.layers.kernels.rows import permute, unpermute
from megablocks_core.layers.moe.dispatch.assignment import by_expert, sum_slots, take_rows
from tests.layers.kernels.cases import CLOSE
from tests.layers.kernels.interpreter import interpreted


def assigned(num_tokens, num_slots, num_experts=4, capacity=None):
    indices = torch.rand(num_tokens, num_experts).argsort(1)[:, :num_slots]
    indices[torch.rand(indices.shape) < 0.2] = -1
    return by_expert(indices, num_experts, capacity=capacity)


@pytest.mark.parametrize("capacity", [None, 3])
def test_both_are_what_the_assignment_says(capacity):
    torch.manual_seed(0)
    order = assigned(7, 2, capacity=capacity)
    x, y = torch.randn(7, 5).double(), torch.randn(len(order.rows), 5).double()
    assert torch.equal(permute(x, order.rows, order.places), take_rows(x, order.rows))
    assert torch.equal(unpermute(y, order.places, order.rows), sum_slots(y, order))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("capacity", [None, 2])
def test_gradients_are_those_of_finite_differences(capacity, weighted):
    torch.manual_seed(0)
    order = assigned(5, 2, capacity=capacity)
    num_places = len(order.rows)
    x, y = (torch.randn(n, 3).double().requires_grad_() for n in (5, num_places))
    weights = torch.randn(num_places).double().requires_grad_() if weighted else None

    def permuted(x, weights):
        return permute(x, order.rows, order.places, weights=weights)

    def unpermuted(y, weights):
        return unpermute(y, order.places, order.rows, weights=weights)

    assert torch.autograd.gradcheck(permuted, (x, weights))
    assert torch.autograd.gradcheck(unpermuted, (y, weights))


def test_without_weights_no_rows_are_kept():
    order = assigned(6, 2)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        x = torch.randn(6, 8, requires_grad=True)
        y = permute(x, order.rows, order.places, weights=torch.ones(len(order.rows)))
        unpermute(y, order.places, order.rows)
    assert all(each.dim() == 1 or not each.is_floating_point() for each in kept)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize("sizes", [(0, 2, 8), (1, 1, 5), (70, 3, 40)])
@interpreted
def test_interpreted_kernels_have_the_outputs_and_gradients_of_the_twins(sizes, dtype, weighted):
    from megablocks_core.layers.kernels.launches import Launches

    num_tokens, num_slots, num_features = sizes
    order = assigned(num_tokens, num_slots)
    x = torch.randn(num_tokens, num_features, dtype=dtype)
    y, dy = (torch.randn(len(order.rows), num_features, dtype=dtype) for _ in range(2))
    weights = torch.rand(len(order.rows))
    results = []
    for kernels in (Launches(), Plain()):
        leaves = [each.clone().requires_grad_() for each in (x, y, weights)]
        given = {"kernels": kernels, "weights": leaves[2] if weighted else None}
        permuted = permute(leaves[0], order.rows, order.places, **given)
        total = unpermute(leaves[1], order.places, order.rows, **given)
        torch.autograd.backward([permuted, total], [dy, torch.ones_like(total)])
        results.append((permuted, total, *(each.grad for each in leaves[: 2 + weighted])))
    for ours, twin in zip(*results, strict=True):
        assert_close(ours, twin, **CLOSE[dtype])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3)}, "must be a matrix"),
        ({"rows": torch.zeros(2, 2)}, "must be a matrix, rows of"),
        ({"places": torch.zeros(2, 1)}, r"places of shape \[2, 1\] must be \[3 k\]"),
        ({"weights": torch.zeros(5)}, r"weights of shape \[5\] must be as rows, \[4\]"),
    ],
)
def test_wrong_shapes_raise(change, message):
    right = {"x": torch.zeros(3, 2), "rows": torch.zeros(4), "places": torch.zeros(3, 1)}
    given = {"weights": None, **right, **change}
    with pytest.raises(ValueError, match=message):
        permute(given["x"], given["rows"], given["places"], weights=given["weights"])


def test_unpermute_wants_a_row_for_each_place():
    with pytest.raises(ValueError, match=r"rows of shape \[4\] must name one of 5 places each"):
        unpermute(torch.zeros(5, 2), torch.zeros(3, 1), torch.zeros(4))
