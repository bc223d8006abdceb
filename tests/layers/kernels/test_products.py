"""Grouped products: gradients, what is kept, errors, and the interpreted kernels."""

import pytest
import torch
from torch.testing import assert_close

from megablocks_core.layers.kernels.plain import Plain
from megablocks_core.layers.kernels.products import grouped_product
from tests.layers.kernels.cases import CLOSE, COUNTS, order
from tests.layers.kernels.interpreter import interpreted


@pytest.mark.parametrize("case", ["nothing", "one_row", "empty_places"])
def test_gradients_are_those_of_finite_differences(case):
    torch.manual_seed(0)
    counts, empty = COUNTS[case]
    rows, places = order(counts, empty, 6)
    counts = torch.tensor(counts)
    x = torch.randn(6, 3).double().requires_grad_()
    weight = torch.randn(len(counts), 2, 3).double().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, weight: grouped_product(x, rows, weight, counts, places=places), (x, weight)
    )
    in_order = torch.randn(len(rows), 3).double().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, weight: grouped_product(x, None, weight, counts), (in_order, weight)
    )


def test_places_at_a_capacity():
    x, weight = torch.randn(4, 3).double(), torch.randn(2, 5, 3).double()
    rows = torch.tensor([2, -1, -1, 0, 3, -1])
    y = grouped_product(x, rows, weight, torch.tensor([1, 2]), capacity=3)
    assert_close(y[[0, 3, 4]], torch.stack([weight[0] @ x[2], weight[1] @ x[0], weight[1] @ x[3]]))
    assert y[[1, 2, 5]].eq(0).all()


def test_no_permuted_tokens_are_kept():
    kept = []
    rows, places = order([30, 34], 0, 8)
    x, weight = torch.randn(8, 6, requires_grad=True), torch.randn(2, 5, 6, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        grouped_product(x, rows, weight, torch.tensor([30, 34]), places=places)
    floats = [each.shape for each in kept if each.is_floating_point()]
    assert floats == [x.shape, weight.shape]


@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize("case", COUNTS)
@interpreted
def test_interpreted_kernels_have_the_outputs_and_gradients_of_the_twins(case, dtype):
    from megablocks_core.layers.kernels.launches import Launches

    counts, empty = COUNTS[case]
    rows, places = order(counts, empty, 40)
    x = torch.randn(40, 24, dtype=dtype)
    weight = torch.randn(len(counts), 10, 24, dtype=dtype) / 5
    dy = torch.randn(len(rows), 10, dtype=dtype)
    results = []
    for kernels in (Launches(), Plain()):
        leaves = [each.clone().requires_grad_() for each in (x, weight)]
        given = {"places": places, "kernels": kernels}
        y = grouped_product(leaves[0], rows, leaves[1], torch.tensor(counts), **given)
        y.backward(dy)
        results.append((y, *(each.grad for each in leaves)))
    for ours, twin in zip(*results, strict=True):
        # Relative to the largest: a sum of many rows is rounded more than once.
        scale = max(twin.abs().max().item(), 1.0) if twin.numel() else 1.0
        assert_close(ours / scale, twin / scale, **CLOSE[dtype])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 5)}, r"x of shape \[3, 5\] must be \[M I\] of weight \[2, 6, 4\]"),
        ({"rows": torch.zeros(2, 2)}, "must be a vector"),
        ({"counts": torch.zeros(3)}, r"counts of shape \[3\] must be \[2\], one an expert"),
        ({"x": torch.zeros(3, 4).double()}, "must have the weight's dtype"),
        ({"capacity": 3}, "capacity=3 must be 4 places over 2 experts"),
        ({"x": torch.zeros(3, 4, requires_grad=True)}, r"places of shape None must be \[3 k\]"),
    ],
)
def test_wrong_arguments_raise(change, message):
    given = {"x": torch.zeros(3, 4), "rows": torch.zeros(4), "counts": torch.zeros(2)}
    given |= {"weight": torch.zeros(2, 6, 4), "capacity": None, **change}
    with pytest.raises(ValueError, match=message):
        grouped_product(
            given["x"],
            given["rows"],
            given["weight"],
            given["counts"],
            capacity=given["capacity"],
        )
