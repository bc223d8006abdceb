"""Orders by expert against plain Python, and the adjoints of what moves along them."""

import hypothesis.strategies as st
import torch
from hypothesis import given
from torch.testing import assert_close

from megablocks_core.layers.moe.counting import count_choices
from megablocks_core.layers.moe.dispatch.assignment import (
    by_expert,
    copy_slots,
    sum_places,
    sum_slots,
    take_rows,
)
from tests.layers.moe.dispatch.reference import random

_EXPERTS = 4
_indices = st.integers(1, 3).flatmap(
    lambda k: st.lists(st.lists(st.integers(-1, _EXPERTS - 1), min_size=k, max_size=k), max_size=9)
)


def _tensor(indices):
    return torch.tensor(indices, dtype=torch.int64).view(len(indices), -1 if indices else 2)


def _slots_of(indices, expert):
    return [slot for slot, its in enumerate(indices.reshape(-1).tolist()) if its == expert]


@given(_indices)
def test_slots_stand_by_expert_then_token(indices):
    indices = _tensor(indices)
    order = by_expert(indices, _EXPERTS)
    right = [_slots_of(indices, expert) for expert in range(_EXPERTS)]
    flat = sum(right, [])
    assert order.slots.tolist() == flat + [-1] * (indices.numel() - len(flat))
    assert order.counts.tolist() == count_choices(indices, _EXPERTS).tolist()
    assert order.counts.tolist() == [len(slots) for slots in right]
    _places_lead_back(order, indices)


@given(_indices, st.integers(1, 4))
def test_a_capacity_drops_the_last_slots(indices, capacity):
    indices = _tensor(indices)
    order = by_expert(indices, _EXPERTS, capacity=capacity)
    right = [_slots_of(indices, expert)[:capacity] for expert in range(_EXPERTS)]
    padded = [slots + [-1] * (capacity - len(slots)) for slots in right]
    assert order.slots.view(_EXPERTS, capacity).tolist() == padded
    assert order.counts.tolist() == [len(slots) for slots in right]
    _places_lead_back(order, indices)


def _places_lead_back(order, indices):
    k = indices.shape[1]
    filled = {slot: place for place, slot in enumerate(order.slots.tolist()) if slot >= 0}
    places = order.places.reshape(-1).tolist()
    assert places == [filled.get(slot, -1) for slot in range(indices.numel())]
    assert order.rows.tolist() == [-1 if s < 0 else s // k for s in order.slots.tolist()]


def test_f079_rows_that_are_nowhere_are_zero_whatever_lies_there():
    x = torch.full((3, 5), torch.nan)
    x[1] = -0.5
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float8_e5m2):
        taken = take_rows(x.to(dtype), torch.tensor([-1, 1, -1])).float()
        assert taken.tolist() == [[0.0] * 5, [-0.5] * 5, [0.0] * 5]
    assert take_rows(torch.ones(0, 5), torch.tensor([-1])).tolist() == [[0.0] * 5]


def test_gradients_follow_the_slots():
    indices = torch.tensor([[3, 0], [-1, 3], [3, 1]])
    for capacity in (None, 2):
        order = by_expert(indices, 4, capacity=capacity)
        x = random(3, 2).requires_grad_()
        y = random(len(order.rows), 2, seed=1).requires_grad_()
        w = random(3, 2, seed=2).requires_grad_()
        assert torch.autograd.gradcheck(lambda x, o=order: copy_slots(x, o), x)
        assert torch.autograd.gradcheck(lambda y, o=order: sum_slots(y, o), y)
        assert torch.autograd.gradcheck(order.take, w)


def test_pieces_of_copies_are_the_copy():
    order = by_expert(torch.tensor([[3, 0], [-1, 3], [3, 1]]), 4)
    x = random(3, 2).requires_grad_()
    (whole,) = copy_slots(x, order)
    pieces = copy_slots(x, order, taken=take_rows(x.detach(), order.rows), sizes=[2, 3])
    assert torch.equal(torch.cat(pieces), whole[:5])
    weights = random(5, 2, seed=1)
    ours = torch.autograd.grad(torch.cat(pieces), x, weights)
    right = torch.autograd.grad(whole[:5], x, weights)
    assert_close(ours, right)


def test_places_are_summed_from_the_first_to_the_last():
    rows = torch.tensor([[1e8], [1.0], [-1e8]])
    in_order = sum_places(rows, torch.tensor([[0, 1, 2], [0, 2, 1], [-1, 1, -1]]))
    assert in_order.tolist() == [[0.0], [1.0], [1.0]]  # 1e8 + 1 is 1e8 in float32
    assert sum_places(rows, torch.empty(2, 0, dtype=torch.int64)).tolist() == [[0], [0]]
