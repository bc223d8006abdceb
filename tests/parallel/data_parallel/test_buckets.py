"""Buckets hold every parameter once, apart by kind, cut evenly."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.parallel.data_parallel.buckets import Described, plan_buckets

CPU, META = torch.device("cpu"), torch.device("meta")

described = st.lists(
    st.tuples(
        st.integers(0, 40),
        st.sampled_from([torch.float32, torch.bfloat16]),
        st.sampled_from([CPU, META]),
        st.booleans(),
    ),
    max_size=30,
).map(lambda rows: [Described(index, *row) for index, row in enumerate(rows)])


@given(described, st.integers(1, 200), st.integers(1, 5), st.integers(1, 5))
def test_every_parameter_has_one_place_in_a_bucket_of_its_kind(parts, limit, shares, copies):
    buckets = plan_buckets(parts, bucket_bytes=limit, shares=shares, expert_shares=copies)
    assert sorted(slot.index for bucket in buckets for slot in bucket.slots) == [
        part.index for part in parts
    ]
    for bucket in buckets:
        kind = (bucket.dtype, bucket.device, bucket.expert)
        start = 0
        for slot in bucket.slots:
            part = parts[slot.index]
            assert (part.dtype, part.device, part.expert) == kind
            assert (slot.start, slot.stop) == (start, start + part.numel)
            start = slot.stop
        assert bucket.shares == (copies if bucket.expert else shares)
        assert 0 <= bucket.length - start < bucket.shares or start == 0
        assert bucket.length > 0
        size = start * bucket.dtype.itemsize
        first = parts[bucket.slots[0].index].numel
        assert size <= limit or len(bucket.slots) == 1 or start == first
        indices = [slot.index for slot in bucket.slots]
        assert indices == sorted(indices, reverse=True)
        # Shards are equal and cover the bucket.
        cuts = [bucket.shard(rank) for rank in range(bucket.shares)]
        assert cuts[0][0] == 0 and cuts[-1][1] == bucket.length
        assert all(left[1] == right[0] for left, right in zip(cuts, cuts[1:], strict=False))


def _floats(*sizes):
    return [Described(index, size, torch.float32, CPU, False) for index, size in enumerate(sizes)]


def test_f059_nine_elements_on_four_ranks_leave_padding_to_the_last():
    (bucket,) = plan_buckets(_floats(9), bucket_bytes=100, shares=4)
    assert [bucket.shard(rank) for rank in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 12)]
    (bucket,) = plan_buckets(_floats(1), bucket_bytes=100, shares=4)
    assert [bucket.shard(rank) for rank in range(4)] == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_buckets_are_filled_from_the_last_parameter_and_closed_before_they_are_too_large():
    buckets = plan_buckets(_floats(2, 5, 100, 3, 4), bucket_bytes=32)
    assert [[slot.index for slot in bucket.slots] for bucket in buckets] == [[4, 3], [2], [1, 0]]


def test_buckets_stand_in_the_order_in_which_they_are_full():
    parts = [
        Described(index, 1, dtype, CPU, False)
        for index, dtype in enumerate([torch.float32, torch.bfloat16, torch.float32])
    ]
    buckets = plan_buckets(parts, bucket_bytes=100)
    assert [bucket.dtype for bucket in buckets] == [torch.bfloat16, torch.float32]


def test_a_size_below_one_is_refused():
    with pytest.raises(ValueError, match="bucket_bytes=0 must be"):
        plan_buckets([], bucket_bytes=0)
