"""The twins, against the words of their docstrings one row at a time."""

import torch
from torch.testing import assert_close

from megablocks_core.layers.kernels.plain import Plain
from megablocks_core.layers.kernels.spans import spans_of
from tests.layers.kernels.cases import COUNTS, order

PLAIN = Plain()


def test_rows_one_at_a_time():
    x, weights = torch.randn(4, 3).double(), torch.randn(6).double()
    rows = torch.tensor([3, -1, 0, 3, 1, -1])
    expected = torch.stack([x[row] if row >= 0 else torch.zeros(3).double() for row in rows])
    assert_close(PLAIN.take(x, rows), expected)
    assert_close(PLAIN.take(x, rows, weights), expected * weights[:, None])
    y = torch.randn(6, 3).double()
    assert_close(PLAIN.row_products(x, rows, y), (expected * y).sum(1))
    places = torch.tensor([[0, -1, 5], [2, 2, 1]])
    assert_close(PLAIN.total(y, places), torch.stack([y[0] + y[5], y[2] + y[2] + y[1]]))
    weighted = y * weights[:, None]
    total = torch.stack([weighted[0] + weighted[5], weighted[2] + weighted[2] + weighted[1]])
    assert_close(PLAIN.total(y, places, weights), total)


def test_sums_are_taken_in_float32_and_in_slot_order():
    y = torch.tensor([[256.0], [1.0], [1.0], [1.0], [-256.0]], dtype=torch.bfloat16)
    assert PLAIN.total(y, torch.arange(5)[None]).tolist() == [[3.0]]
    big = torch.tensor([[1e8], [1.0], [-1e8]])
    assert PLAIN.total(big, torch.tensor([[0, 1, 2], [0, 2, 1]])).tolist() == [[0.0], [1.0]]


def test_products_one_at_a_time():
    for counts, empty in COUNTS.values():
        rows, _ = order(counts, empty, 5)
        x, weight = torch.randn(5, 3).double(), torch.randn(len(counts), 2, 3).double()
        dy = torch.randn(len(rows), 2).double()
        experts = [expert for expert, count in enumerate(counts) for _ in range(count)]
        y, dx, dweight = dy.new_zeros(len(rows), 2), dy.new_zeros(len(rows), 3), weight * 0
        for place, expert in enumerate(experts):
            row = x[rows[place]] if rows[place] >= 0 else x.new_zeros(3)
            y[place] = weight[expert] @ row
            dx[place] = dy[place] @ weight[expert]
            dweight[expert] += torch.outer(dy[place], row)
        spans = spans_of(torch.tensor(counts), len(rows))
        assert_close(PLAIN.product(x, rows, weight, spans), y)
        assert_close(PLAIN.input_gradient(dy, weight, spans), dx)
        assert_close(PLAIN.weight_gradient(dy, x, rows, spans), dweight)
        into = weight.clone()
        assert PLAIN.weight_gradient(dy, x, rows, spans, into=into) is into
        assert_close(into, weight + dweight)


def test_gradients_of_empty_places_are_not_read():
    rows, torn = torch.tensor([1, -1]), torch.tensor([[2.0], [torch.nan]])
    x = torch.tensor([[5.0], [3.0]])
    assert PLAIN.row_products(x, rows, torn).tolist() == [6.0, 0.0]
    spans = spans_of(torch.tensor([2]), 2)
    assert PLAIN.weight_gradient(torn, x, rows, spans).tolist() == [[[6.0]]]


def test_no_rows_at_all():
    x, rows = torch.zeros(0, 4), torch.tensor([-1, -1])
    assert PLAIN.take(x, rows).tolist() == [[0.0] * 4] * 2
    assert PLAIN.total(x, torch.zeros(3, 0, dtype=torch.int64)).shape == (3, 4)
