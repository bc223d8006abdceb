"""The sum of two routings is the routing of all their tokens."""

import pytest
import torch
from torch.testing import assert_close

from megablocks_core.layers.moe import Routing, limit, route_top_k


def routed(rows, *, mask=None):
    return route_top_k(rows, top_k=2, mask=mask)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("second", [False, True])
def test_micro_batches_add_up_to_the_batch(first, second):
    logits, mask = torch.randn(10, 5), torch.arange(10) % 3 > 0
    mask[:4] |= not first
    mask[4:] |= not second
    total = routed(logits[:4], mask=mask[:4] if first else None)
    total = total + routed(logits[4:], mask=mask[4:] if second else None)
    whole = routed(logits, mask=mask if first or second else None)
    assert isinstance(total, Routing)
    assert_close(total._asdict(), whole._asdict())
    assert total.num_tokens == whole.num_tokens and total.num_experts == 5


def test_gradients_come_through_a_sum():
    logits = torch.randn(6, 4, requires_grad=True)
    total = routed(logits[:2]) + routed(logits[2:])
    (total.scores * torch.arange(4.0)).sum().backward()
    found, logits.grad = logits.grad, None
    (routed(logits).scores * torch.arange(4.0)).sum().backward()
    assert_close(found, logits.grad)


def test_capacities_add_up_where_both_have_one():
    plain = routed(torch.randn(6, 4))
    small = limit(plain, capacity=2)
    assert (small + small).capacity == 4
    assert (small + plain).capacity is None


def test_routings_of_other_widths_do_not_add():
    with pytest.raises(ValueError, match=r"scores of \[T 4\] and \[T 5\]"):
        _ = routed(torch.randn(3, 4)) + routed(torch.randn(3, 5))
    with pytest.raises(ValueError, match=r"indices of \[T 2\] and \[T 1\]"):
        _ = routed(torch.randn(3, 4)) + route_top_k(torch.randn(3, 4), top_k=1)
