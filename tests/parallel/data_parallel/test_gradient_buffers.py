"""What a bucket's buffer holds and shows, through every order of backwards and drops.

The messages are left out: what ``fill`` leaves is doubled, as if another rank had sent the same.
"""

import pytest
import torch
from torch import nn

from megablocks_core.groups.gradient_shards import ShardedGradient
from megablocks_core.parallel.data_parallel.buckets import Described, plan_buckets
from megablocks_core.parallel.data_parallel.gradient_buffers import (
    AliasedBuffer,
    CastBuffer,
    HiddenBuffer,
)

KINDS = {"aliased": (AliasedBuffer, torch.float32), "cast": (CastBuffer, torch.bfloat16)}


def _buffer(kind, dtype, *, scale=0.5, shares=1):
    parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in (3, 2)]
    described = [
        Described(index, one.numel(), dtype, one.device, False)
        for index, one in enumerate(parameters)
    ]
    (bucket,) = plan_buckets(described, bucket_bytes=1000, shares=shares)
    ordered = [parameters[slot.index] for slot in bucket.slots]
    return kind(bucket, ordered, dtype=torch.float32, scale=scale), ordered


def _take(buffer, **gradients):
    for slot, value in gradients.items():
        slot = int(slot[1:])
        parameter = buffer.parameters[slot]
        buffer.take(slot, torch.full_like(parameter, value))


def _reduce(buffer, **gradients):
    """A backward with these gradients, of which two ranks have the same."""
    _take(buffer, **gradients)
    used = buffer.fill()
    buffer.flat.mul_(2)
    buffer.give(used)


def _grads(parameters):
    return [None if one.grad is None else one.grad.unique().tolist() for one in parameters]


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def pair(request):
    return _buffer(*request.param)


def test_a_backward_sets_what_was_used_and_leaves_the_rest(pair):
    buffer, parameters = pair
    _reduce(buffer, s0=3.0)
    assert _grads(parameters) == [[3.0], None]


def test_several_contributions_are_each_scaled_once(pair):
    buffer, parameters = pair
    _take(buffer, s0=1.0)
    _reduce(buffer, s0=2.0, s1=4.0)
    assert _grads(parameters) == [[3.0], [4.0]]


def test_a_backward_on_top_of_reduced_gradients_adds_to_them(pair):
    buffer, parameters = pair
    _reduce(buffer, s0=1.0, s1=10.0)
    kept = [one.grad for one in parameters]
    for _ in range(3):
        _reduce(buffer, s0=2.0)
    assert _grads(parameters) == [[7.0], [10.0]]
    assert [one.grad for one in parameters] == kept


def test_a_sum_that_gathers_stays_the_gradient_that_was_shown(pair):
    buffer, parameters = pair
    for _ in range(2):
        _take(buffer, s0=1.0)
        buffer.keep()
        shown = parameters[0].grad
        _take(buffer, s0=2.0)
        assert parameters[0].grad is shown  # and nothing was copied onto itself
        buffer.keep()
        assert parameters[0].grad is shown


def test_what_gathered_without_messages_is_reduced_once(pair):
    buffer, parameters = pair
    for value in (1.0, 2.0):
        _take(buffer, s0=value)
        buffer.keep()
    assert _grads(parameters) == [[1.5], None]  # this rank's own, scaled
    assert buffer.holds_own()
    _reduce(buffer, s0=3.0, s1=1.0)
    assert _grads(parameters) == [[6.0], [1.0]]
    assert not buffer.holds_own()


def test_it_is_reduced_by_a_backward_that_does_not_reach_it(pair):
    buffer, parameters = pair
    _take(buffer, s0=1.0)
    buffer.keep()
    _reduce(buffer, s1=1.0)
    assert _grads(parameters) == [[1.0], [1.0]]


def test_it_is_kept_apart_from_a_reduced_sum(pair):
    buffer, parameters = pair
    _reduce(buffer, s0=5.0)
    _take(buffer, s0=1.0)
    buffer.keep()
    assert _grads(parameters) == [[5.0], None]
    _reduce(buffer, s0=2.0)
    assert _grads(parameters) == [[8.0], None]
    _reduce(buffer, s0=1.0, s1=1.0)
    assert _grads(parameters) == [[9.0], [1.0]]


@pytest.mark.parametrize("reach", [True, False])
def test_what_was_dropped_in_between_is_gone(pair, reach):
    buffer, parameters = pair
    _take(buffer, s0=1.0, s1=1.0)
    buffer.keep()
    for parameter in parameters:
        parameter.grad = None
    assert not buffer.holds_own()
    _reduce(buffer, **({"s0": 2.0} if reach else {}))
    assert _grads(parameters) == [[2.0] if reach else None, None]
    for parameter in parameters:
        parameter.grad = None
    _reduce(buffer, s0=4.0, s1=4.0)
    assert _grads(parameters) == [[4.0], [4.0]]


@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_what_a_user_makes_of_a_gradient_counts(pair, how):
    buffer, parameters = pair

    def change(value):
        if how == "in place":
            parameters[0].grad.fill_(value)
        else:
            parameters[0].grad = torch.full_like(parameters[0], value)

    _take(buffer, s0=1.0)
    buffer.keep()
    change(2.0)
    _reduce(buffer, s0=2.0)  # 2 and half of 2, twice
    assert _grads(parameters)[0] == [6.0]
    change(1.0)
    _reduce(buffer, s0=2.0)
    assert _grads(parameters)[0] == [3.0]
    change(0.0)
    _take(buffer, s0=4.0)
    buffer.keep()
    _reduce(buffer)
    assert _grads(parameters)[0] == [4.0]


def test_what_a_user_still_holds_is_not_overwritten(pair):
    buffer, parameters = pair
    _reduce(buffer, s0=1.0, s1=1.0)
    kept = [one.grad for one in parameters]
    for parameter in parameters:
        parameter.grad = None
    _reduce(buffer, s0=7.0, s1=7.0)
    assert [one.unique().tolist() for one in kept] == [[1.0], [1.0]]


def test_memory_is_taken_again():
    for kind, dtype in KINDS.values():
        buffer, parameters = _buffer(kind, dtype)
        places = set()
        for _ in range(4):
            _reduce(buffer, s0=1.0, s1=1.0)
            for parameter in parameters:
                parameter.grad = None
            _take(buffer, s0=1.0)
            places.add(buffer.flat.data_ptr())
            buffer.drop()
        assert len(places) == 1


def test_a_float32_gradient_is_a_view_of_the_buffer():
    buffer, parameters = _buffer(AliasedBuffer, torch.float32)
    _reduce(buffer, s0=1.0, s1=1.0)
    storages = {one.grad.untyped_storage().data_ptr() for one in parameters}
    assert storages == {buffer.flat.untyped_storage().data_ptr()}


@pytest.mark.parametrize("reduces", [True, False])
def test_sixteen_bit_gradients_are_summed_in_float32(reduces):
    buffer, (parameter, _) = _buffer(CastBuffer, torch.bfloat16, scale=1.0)
    for value in [256.0] + [1.0] * 8:  # 256 + 1 is 256 in bfloat16
        _take(buffer, s0=value)
        if reduces:
            buffer.give(buffer.fill())
        else:
            buffer.keep()
    assert parameter.grad.dtype == torch.bfloat16
    assert parameter.grad.unique().tolist() == [264.0]


def test_a_float16_gradient_is_widened_before_it_is_scaled():
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float16))
    (bucket,) = plan_buckets(
        [Described(0, 1, torch.float16, parameter.device, False)], bucket_bytes=8
    )
    buffer = AliasedBuffer(bucket, [parameter], dtype=torch.float32, scale=1 / 4)
    smallest = torch.full((1,), 2.0**-24, dtype=torch.float16)
    buffer.take(0, smallest)
    buffer.fill()
    assert buffer.flat.item() == 2.0**-26


def test_padding_and_idle_places_are_sent_as_zeros():
    buffer, _ = _buffer(HiddenBuffer, torch.float32, shares=4)
    _take(buffer, s1=2.0)
    assert buffer.fill() == [False, True]
    assert buffer.flat.tolist() == [0, 0, 1, 1, 1, 0, 0, 0]


def test_a_hidden_buffer_shows_a_stand_in_and_gives_its_memory_back():
    buffer, parameters = _buffer(HiddenBuffer, torch.float32)
    _take(buffer, s0=1.0)
    buffer.keep()
    _reduce(buffer, s0=1.0)
    assert [type(parameter.grad) for parameter in parameters] == [ShardedGradient, type(None)]
    assert buffer.flat[:2].tolist() == [2.0, 2.0]
    buffer.free()
    _take(buffer, s0=1.0)
    buffer.keep()
    assert buffer.holds_own()
    buffer.drop()
    assert not buffer.holds_own()


def test_a_gradient_has_the_parameters_order_of_memory():
    weight = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    parameter = nn.Parameter(weight)
    (bucket,) = plan_buckets(
        [Described(0, 96, torch.float32, weight.device, False)], bucket_bytes=1000
    )
    buffer = AliasedBuffer(bucket, [parameter], dtype=torch.float32, scale=1.0)
    gradient = torch.randn(2, 3, 4, 4)
    buffer.take(0, gradient)
    buffer.give(buffer.fill())
    assert parameter.grad.stride() == weight.stride()
    assert torch.equal(parameter.grad, gradient)
