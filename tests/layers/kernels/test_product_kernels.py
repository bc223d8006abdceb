"""Grouped products say what their twins say, on shapes that fit no tile."""

import pytest
import torch
from torch.testing import assert_close

from megablocks_core.layers.kernels.plain import Plain
from megablocks_core.layers.kernels.spans import spans_of
from tests.layers.kernels.cases import CLOSE, COUNTS, fenced, order
from tests.layers.kernels.interpreter import interpreted

DTYPES = list(CLOSE)
CASES = pytest.mark.parametrize("case", COUNTS)
OF_EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES)


def launches():
    from megablocks_core.layers.kernels.launches import Launches

    return Launches()


def given(case, dtype, *, num_outputs=21, num_inputs=70, num_rows=50):
    """Tokens, their places, matrices, output gradients, spans."""
    counts, empty = COUNTS[case]
    rows, _ = order(counts, empty, num_rows)
    x = fenced(torch.randn(num_rows, num_inputs, dtype=dtype))
    weight = torch.randn(len(counts), num_outputs, num_inputs, dtype=dtype) / num_inputs**0.5
    weight = fenced(weight)
    dy = fenced(torch.randn(len(rows), num_outputs, dtype=dtype))
    return x, rows, weight, dy, spans_of(torch.tensor(counts), len(rows))


def both(method, *arguments, **named):
    return (getattr(each, method)(*arguments, **named) for each in (launches(), Plain()))


@OF_EACH_DTYPE
@CASES
@interpreted
def test_products_of_gathered_rows(case, dtype):
    x, rows, weight, _, spans = given(case, dtype)
    y, twin = both("product", x, rows, weight, spans)
    assert_close(y, twin, **CLOSE[dtype])
    assert y.shape == (len(rows), 21) and y[rows < 0].eq(0).all()


@CASES
@interpreted
def test_products_of_rows_in_order(case):
    x, rows, weight, _, spans = given(case, torch.float32)
    assert_close(*both("product", x[rows], None, weight, spans), **CLOSE[torch.float32])


@OF_EACH_DTYPE
@CASES
@interpreted
def test_gradients_of_rows(case, dtype):
    _, rows, weight, dy, spans = given(case, dtype)
    dx, twin = both("input_gradient", dy, weight, spans)
    assert_close(dx, twin, **CLOSE[dtype])
    assert dx.shape == (len(rows), 70)


@OF_EACH_DTYPE
@CASES
@interpreted
def test_gradients_of_matrices(case, dtype):
    x, rows, weight, dy, spans = given(case, dtype)
    gradient, twin = both("weight_gradient", dy, x, rows, spans)
    close = {"rtol": 1e-2, "atol": 0.2} if dtype == torch.bfloat16 else {"rtol": 2e-3, "atol": 2e-2}
    assert_close(gradient, twin, **(close if dtype != torch.float32 else CLOSE[dtype]))
    assert gradient.shape == weight.shape


@CASES
@interpreted
def test_gradients_of_matrices_add_to_what_is_there(case):
    x, rows, weight, dy, spans = given(case, torch.float32)
    first = torch.randn_like(weight)
    into = first.clone()
    assert launches().weight_gradient(dy, x[rows], None, spans, into=into) is into
    twin = Plain().weight_gradient(dy, x[rows], None, spans, into=first)
    assert_close(into, twin, **CLOSE[torch.float32])


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 1), (130, 33), (64, 128)])
@interpreted
def test_matrices_of_any_size(num_outputs, num_inputs):
    sizes = {"num_outputs": num_outputs, "num_inputs": num_inputs}
    x, rows, weight, dy, spans = given("empty_places", torch.float16, **sizes)
    close = {"rtol": 2e-3, "atol": 2e-2}
    assert_close(*both("product", x, rows, weight, spans), **close)
    assert_close(*both("input_gradient", dy, weight, spans), **close)
    assert_close(*both("weight_gradient", dy, x, rows, spans), **close)


@interpreted
def test_matrices_that_lie_transposed():
    x, rows, weight, _, spans = given("empty_places", torch.float32)
    lying = weight.transpose(1, 2).contiguous().transpose(1, 2)
    y, twin = launches().product(x, rows, lying, spans), Plain().product(x, rows, weight, spans)
    assert_close(y, twin, **CLOSE[torch.float32])


@interpreted
def test_what_lies_in_empty_places_is_not_read():
    x, rows, weight, dy, spans = given("empty_places", torch.float32)
    holes = rows < 0
    torn = dy.masked_fill(holes[:, None], torch.nan)
    gradients = [launches().weight_gradient(each, x, rows, spans) for each in (torn, dy)]
    assert_close(*gradients, rtol=0, atol=0)


@interpreted
def test_counts_beyond_the_places_touch_no_other_memory():
    x, rows, weight, dy, _ = given("one_expert", torch.float32)
    spans = spans_of(torch.tensor([1000]), len(rows))
    assert_close(*both("product", x, rows, weight, spans), **CLOSE[torch.float32])
    assert_close(*both("weight_gradient", dy, x, rows, spans), **CLOSE[torch.float32])


@interpreted
def test_capacity_leaves_places_between_experts_empty():
    x, weight = torch.randn(6, 10), torch.randn(3, 4, 10)
    rows = torch.tensor([0, 1, -1, -1, -1, -1, 5, 4, 3])
    spans = spans_of(torch.tensor([2, 0, 3]), 9, capacity=3)
    y, twin = both("product", x, rows, weight, spans)
    assert_close(y, twin, **CLOSE[torch.float32])
    assert_close(y[6:], x[[5, 4, 3]] @ weight[2].T)
    assert y[2:6].eq(0).all()


@interpreted
def test_strided_tensors():
    x, rows, weight, dy, spans = given("empty_places", torch.float32)
    strided = [each.T.contiguous().T for each in (x, dy)]
    apart = torch.stack([rows, rows], 1)[:, 0]
    for method, ours, twin in (
        ("product", (strided[0], apart, weight, spans), (x, rows, weight, spans)),
        ("input_gradient", (strided[1], weight, spans), (dy, weight, spans)),
        ("weight_gradient", (strided[1], strided[0], apart, spans), (dy, x, rows, spans)),
    ):
        results = getattr(launches(), method)(*ours), getattr(Plain(), method)(*twin)
        assert_close(*results, **CLOSE[torch.float32])
