"""Where experts' places begin, and how many are filled."""

import pytest
import torch

from megablocks_core.layers.moe.dispatch import Dispatched
from megablocks_core.layers.moe.experts import places


def dispatched(**others):
    empty = torch.empty(0, dtype=torch.int64)
    return Dispatched(torch.empty(0, 2), empty, torch.empty(0), torch.tensor([2, 0, 3]), **others)


def test_counts_of_the_host_are_used_where_a_dispatcher_has_read_them(monkeypatch):
    assert places.host_counts(dispatched()) == [2, 0, 3]
    monkeypatch.setattr(places, "read_counts", lambda _: pytest.fail("a second read"))
    assert places.host_counts(dispatched(host_counts=[2, 0, 3])) == [2, 0, 3]


def test_places_follow_one_another_or_lie_a_capacity_apart():
    assert places.starts_of(dispatched(), [2, 0, 3]) == [0, 2, 2]
    assert places.starts_of(dispatched(capacity=4), [2, 0, 3]) == [0, 4, 8]
