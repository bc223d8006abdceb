"""Experts by three products of rows are ``GroupedExperts``, whoever computes the products."""

import pytest
import torch
from torch.testing import assert_close

from megablocks_core.layers.moe.experts import GroupedExperts
from megablocks_core.layers.moe.experts.activations import ACTIVATIONS
from megablocks_core.layers.moe.experts.by_products import by_products
from tests.layers.moe.experts.cases import (
    FFN,
    HIDDEN,
    NUM_EXPERTS,
    ROUTINGS,
    built,
    everything,
    routing,
)


class ByProducts(GroupedExperts):
    multiple = 1

    def forward(self, dispatched):
        return by_products(self, dispatched, self._product, multiple=self.multiple)

    def _product(self, name, x, counts):
        assert all(count % self.multiple == 0 for count in counts) and sum(counts) == len(x)
        weight, bias = (getattr(self, f"{name}_{leaf}") for leaf in ("proj", "bias"))
        y = [rows @ each.t() for rows, each in zip(x.split(counts), weight, strict=True)]
        if bias is not None and name != "down":
            y = [rows + each for rows, each in zip(y, bias, strict=True)]
        return torch.cat(y)


def made(**options):
    torch.manual_seed(1)
    return ByProducts(NUM_EXPERTS, HIDDEN, FFN, dtype=torch.float64, **options)


@pytest.mark.parametrize("case", ROUTINGS)
@pytest.mark.parametrize("weigh", ["hidden", "input", "output"])
def test_outputs_and_gradients_with_and_without_zeros_between(case, weigh):
    x = torch.randn(len(ROUTINGS[case]), HIDDEN, dtype=torch.float64)
    for bias in (False, True):
        experts, plain = made(bias=bias, weigh=weigh), built(bias=bias, weigh=weigh)
        for capacity in (None, 3):
            routed = routing(ROUTINGS[case], capacity=capacity)
            expected = everything(plain, x, routed)
            for experts.multiple in (1, 4):
                found = everything(experts, x, routed)
                assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation):
    x, routed = torch.randn(5, HIDDEN, dtype=torch.float64), routing(ROUTINGS["mixed"])
    found = everything(made(activation=activation), x, routed)
    expected = everything(built(activation=activation), x, routed)
    assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_rows_of_other_features_are_refused_also_where_there_are_none():
    for rows in (5, 0):
        routed = routing(ROUTINGS["mixed" if rows else "no token"])
        with pytest.raises(ValueError, match=rf"x of shape \[{rows}, 7\] must be \[M {HIDDEN}\]"):
            everything(made(), torch.randn(rows, 7, dtype=torch.float64), routed)
