"""Host buffers are used again, and grow no further than what is needed at a time."""

import random

from megablocks_core.parallel import HostBuffers


def test_a_buffer_comes_back_when_its_loan_dies_and_serves_again():
    buffers = HostBuffers()
    first = buffers.take(1000)
    place = first.bytes.data_ptr()
    assert (len(first.bytes), buffers.allocated, buffers.free) == (1000, 1024, 0)
    del first
    assert buffers.free == 1024
    assert buffers.take(900).bytes.data_ptr() == place
    assert buffers.allocated == 1024


def test_two_loans_are_two_places():
    buffers = HostBuffers()
    first, second = buffers.take(600), buffers.take(600)
    first.bytes.fill_(1)
    second.bytes.fill_(2)
    assert (first.bytes == 1).all()
    assert buffers.allocated == 2 * 1024


def test_the_smallest_that_fits_is_taken_and_none_that_is_far_too_large():
    buffers = HostBuffers()
    loans = [buffers.take(size) for size in (8192, 2048, 4096)]
    places = {len(loan.bytes): loan.bytes.data_ptr() for loan in loans}
    loans.clear()
    assert buffers.take(2000).bytes.data_ptr() == places[2048]
    small = buffers.take(512)
    assert small.bytes.data_ptr() not in places.values()
    assert buffers.allocated == 8192 + 2048 + 4096 + 512


def test_steps_of_changing_sizes_settle():
    """Twice what the largest step needs is never passed by much."""
    buffers, draw, largest = HostBuffers(), random.Random(0), 0
    for _ in range(200):
        sizes = [draw.randrange(1, 1 << 14) for _ in range(20)]
        largest = max(largest, sum(sizes))
        loans = [buffers.take(size) for size in sizes]
        del loans
    assert buffers.free == buffers.allocated < 3 * largest
