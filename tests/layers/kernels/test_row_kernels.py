"""The kernels that move rows say what their twins say, on shapes that fit no block."""

import pytest
import torch
from torch.testing import assert_close

from megablocks_core.layers.kernels.plain import Plain
from tests.layers.kernels.cases import CLOSE, fenced
from tests.layers.kernels.interpreter import interpreted

# Rows M, places N, slots k, features H: wider than a block, no power of two, none at all.
SHAPES = [
    (5, 9, 3, 1),
    (7, 40, 2, 1030),
    (1, 1, 1, 24),
    (3, 0, 2, 8),
    (0, 4, 1, 8),
    (300, 500, 4, 20),
]
DTYPES = list(CLOSE)


def launches():
    from megablocks_core.layers.kernels.launches import Launches

    return Launches()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@interpreted
def test_taken_rows(shape, dtype, weighted):
    num_rows, num_places, _, num_features = shape
    x = fenced(torch.randn(num_rows, num_features, dtype=dtype))
    rows = torch.randint(-1, num_rows, (num_places,))
    weights = torch.randn(num_places) if weighted else None
    taken, twin = (each.take(x, rows, weights) for each in (launches(), Plain()))
    assert_close(taken, twin, **(CLOSE[dtype] if weighted else {"rtol": 0, "atol": 0}))
    assert taken.shape == (num_places, num_features) and taken[rows < 0].eq(0).all()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@interpreted
def test_sums_over_slots(shape, dtype, weighted):
    num_tokens, num_places, num_slots, num_features = shape
    y = fenced(torch.randn(num_places, num_features, dtype=dtype))
    places = torch.randint(-1, num_places, (num_tokens, num_slots))
    weights = torch.randn(num_places) if weighted else None
    total, twin = (each.total(y, places, weights) for each in (launches(), Plain()))
    # Slot by slot in float32: the same bits where the interpreter rounds as torch does.
    exact = dtype != torch.bfloat16
    assert_close(total, twin, **({"rtol": 0, "atol": 0} if exact else CLOSE[dtype]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@interpreted
def test_products_of_rows(shape, dtype):
    num_rows, num_places, _, num_features = shape
    x = fenced(torch.randn(num_rows, num_features, dtype=dtype))
    rows = torch.randint(-1, num_rows, (num_places,))
    y = fenced(torch.randn(num_places, num_features, dtype=dtype))
    products, twin = (each.row_products(x, rows, y) for each in (launches(), Plain()))
    assert_close(products, twin, rtol=1e-5, atol=1e-4)
    assert products.dtype == torch.float32


@interpreted
def test_the_sum_is_taken_in_slot_order():
    y = torch.tensor([[1e8], [1.0], [-1e8]])
    total = launches().total(y, torch.tensor([[0, 1, 2], [0, 2, 1]]))
    assert total.tolist() == [[0.0], [1.0]]


@interpreted
def test_what_no_place_names_is_not_read():
    y = torch.tensor([[torch.nan], [2.0]])
    weights = torch.tensor([torch.nan, 3.0])
    places = torch.tensor([[-1, 1]])
    assert launches().total(y, places, weights).tolist() == [[6.0]]
    rows = torch.tensor([-1, 1])
    assert launches().take(y, rows, weights).tolist() == [[0.0], [6.0]]
    assert launches().row_products(y, rows, torch.tensor([[torch.nan], [5.0]])).tolist() == [0, 10]


@interpreted
def test_strided_tensors():
    x, rows, weights = (
        torch.randn(9, 4).T,
        torch.tensor([[3, 0], [-1, 0], [2, 0]])[:, 0],
        torch.rand(1),
    )
    weights = weights.expand(4)
    places = torch.tensor([[3, 0, 1], [-1, 2, 0]]).T
    assert_close(launches().take(x, rows, weights[:3]), Plain().take(x, rows, weights[:3]))
    assert_close(launches().total(x, places, weights), Plain().total(x, places, weights))
    y = torch.randn(1, 9).expand(3, 9)
    assert_close(launches().row_products(x, rows, y), Plain().row_products(x, rows, y))
