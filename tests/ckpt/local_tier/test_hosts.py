"""Copies lie on other hosts, as many as were asked for, and evenly."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.ckpt.local_tier.hosts import partners


def test_neighbouring_hosts_keep_each_others_parts():
    assert partners(["a", "a", "b", "b"], 1) == [[2], [3], [0], [1]]
    assert partners(["a", "b", "c"], 2) == [[1, 2], [2, 0], [0, 1]]
    assert partners(["a", "a", "b"], 1) == [[2], [2], [0]]
    assert partners(["a"], 0) == [[]]


@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=40), st.data())
def test_every_part_outlives_the_loss_of_as_many_hosts_as_there_are_copies(hosts, data):
    copies = data.draw(st.integers(0, len(set(hosts)) - 1))
    for rank, others in enumerate(partners(hosts, copies)):
        assert len({hosts[one] for one in [rank, *others]}) == copies + 1


@given(st.integers(1, 8), st.integers(2, 6), st.data())
def test_hosts_of_one_size_bear_the_same(ranks, hosts, data):
    copies = data.draw(st.integers(1, hosts - 1))
    kept = Counter(
        one
        for others in partners([str(host) for host in range(hosts) for _ in range(ranks)], copies)
        for one in others
    )
    assert set(kept.values()) == {copies} and len(kept) == ranks * hosts


@pytest.mark.parametrize("copies", [-1, 2, 3])
def test_as_many_copies_as_hosts_are_refused(copies):
    with pytest.raises(ValueError, match=rf"copies={copies} must be from 0 to 1, .* the 2 that"):
        partners(["a", "b", "a"], copies)
