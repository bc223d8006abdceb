"""Sums over the places of a row are in their order, known or found."""

import torch
from torch.testing import assert_close

from megablocks_core.layers.moe.dispatch import LocalDispatcher
from megablocks_core.layers.moe.experts.inverse import inverse_of, sum_inverse, take_places
from tests.layers.moe.experts.cases import HIDDEN, ROUTINGS, routing


def test_places_that_are_known_and_found_give_the_same_sums():
    for indices in ROUTINGS.values():
        routed = routing(indices)
        x = torch.randn(len(routed.indices), HIDDEN, dtype=torch.float64)
        dispatched, _ = LocalDispatcher().dispatch(x, routed)
        rows = torch.randn(len(dispatched.rows), HIDDEN, dtype=torch.float64)
        expected = torch.zeros_like(x)
        for place, row in enumerate(dispatched.rows.tolist()):
            if row >= 0:
                expected[row] += rows[place]
        for places in (dispatched.places, None):
            inverse = inverse_of(dispatched._replace(places=places))
            assert (inverse.lengths is None) == (places is not None)
            assert_close(sum_inverse(rows, inverse), expected)


def test_taking_and_summing_are_adjoint():
    routed = routing(ROUTINGS["empty slots"])
    x = torch.randn(4, HIDDEN, dtype=torch.float64, requires_grad=True)
    dispatched, _ = LocalDispatcher().dispatch(x, routed)
    taken = take_places(x, dispatched.rows, inverse_of(dispatched))
    dy = torch.randn_like(taken)
    taken.backward(dy)
    filled = dispatched.rows >= 0
    assert not taken[~filled].any()
    expected = torch.zeros_like(x).index_add(0, dispatched.rows[filled], dy[filled])
    assert_close(x.grad, expected)
