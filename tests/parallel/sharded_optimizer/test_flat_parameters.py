"""Parameters become views of one buffer, of which each rank owns an equal shard."""

import pytest
import torch
from torch import nn

from megablocks_core.groups import LOCAL, Group
from megablocks_core.parallel.data_parallel.buckets import Described, plan_buckets
from megablocks_core.parallel.sharded_optimizer.flat_parameters import FlatParameters, own_ranges

CPU = torch.device("cpu")


def _bucket(*sizes, shares):
    described = [Described(i, n, torch.float32, CPU, False) for i, n in enumerate(sizes)]
    (bucket,) = plan_buckets(described, bucket_bytes=1 << 20, shares=shares)
    return bucket


def _group(size, rank):
    return Group(tuple(range(size)), rank=rank)


def test_f_059_nine_elements_on_four_ranks_and_one_element():
    owned = [list(own_ranges(_bucket(9, shares=4), _group(4, rank))) for rank in range(4)]
    assert [(one.start, one.length) for (one,) in owned] == [(0, 3), (3, 3), (6, 3), (0, 0)]
    owned = [list(own_ranges(_bucket(1, shares=4), _group(4, rank))) for rank in range(4)]
    assert [(one.start, one.length) for (one,) in owned] == [(0, 1), (0, 0), (0, 0), (0, 0)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_ranges_of_all_ranks_are_each_element_once(size):
    sizes = [4, 0, 7, 1, 12]
    seen = [[0] * n for n in sizes]
    bucket = _bucket(*sizes, shares=size)
    for rank in range(size):
        first, last = bucket.shard(rank)
        offsets = []
        for index, start, offset, length in own_ranges(bucket, _group(size, rank)):
            for place in range(start, start + length):
                seen[index][place] += 1
            offsets += range(offset, offset + length)
        assert offsets == sorted(set(offsets)) and all(at < last - first for at in offsets)
    assert all(count == 1 for counts in seen for count in counts)


def test_parameters_keep_identity_shape_and_values_in_one_buffer():
    parameters = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(()))]
    parameters.append(nn.Parameter(torch.randn(4, 2).T))  # not contiguous
    before = [one.detach().clone() for one in parameters]
    flat = FlatParameters(_bucket(12, 1, 8, shares=2), parameters, group=_group(2, 1))
    for one, old in zip(parameters, before, strict=True):
        assert torch.equal(one, old) and one.is_leaf and one.requires_grad
    storages = {one.untyped_storage().data_ptr() for one in parameters}
    assert len(storages) == 1
    assert parameters[0].untyped_storage().nbytes() == 22 * 4
    for own in flat.ranges:
        flat.weight(own).fill_(own.index)
        whole = parameters[own.index].detach().view(-1)
        assert (whole[own.start : own.start + own.length] == own.index).all()
    assert flat.moved() is None
    parameters[1].data = torch.zeros(())
    assert flat.moved() == 1


def test_alone_nothing_is_copied():
    parameter = nn.Parameter(torch.randn(3, 4))
    place = parameter.data_ptr()
    flat = FlatParameters(_bucket(12, shares=1), [parameter], group=LOCAL)
    assert parameter.data_ptr() == place
    assert flat.start_gather() is None
    (own,) = flat.ranges
    assert flat.weight(own).data_ptr() == place
