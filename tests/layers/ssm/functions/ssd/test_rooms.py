"""Memory that is used again is the same memory, and work has its shapes."""

import torch

from megablocks_core.layers.ssm.functions.ssd.rooms import Rooms, Work, flat, widened


def test_a_room_stays_where_it_is_unless_it_must_grow():
    rooms = Rooms(torch.zeros(1), torch.float64)
    first = rooms.of("a", 4, 3)
    assert rooms.of("a", 3, 2).data_ptr() == first.data_ptr()
    assert rooms.of("b", 4, 3).data_ptr() != first.data_ptr()
    grown = rooms.of("a", 5, 3)
    assert grown.shape == (5, 3) and grown.dtype == torch.float64 and grown.is_contiguous()


def test_what_is_wide_already_is_not_copied():
    rooms = Rooms(torch.zeros(1), torch.float32)
    x = torch.randn(3, 2)
    assert widened(x, rooms, "x") is x
    wide = widened(x.bfloat16(), rooms, "x")
    assert wide.dtype == torch.float32 and torch.equal(wide, x.bfloat16().float())


def test_views_of_work_show_the_same_numbers():
    n, b, g, q, j, P, N = shape = (2, 1, 3, 4, 2, 5, 6)
    work = Work(Rooms(torch.zeros(1), torch.float32), shape)
    work.moved.copy_(torch.randn(n, b, g * j, q, P))
    for group, head, token in ((0, 0, 0), (2, 1, 3), (1, 0, 2)):
        right = work.moved[1, 0, group * j + head, token]
        assert torch.equal(work.moved_by_token[1, 0, group, token, head], right)
        assert torch.equal(work.moved_[g * j + group * j + head, token], right)
    states = torch.randn(n, b, g * j, P, N)
    assert torch.equal(work.by_group(states)[g + 1], states[1, 0, j : 2 * j].reshape(j * P, N))
    assert flat(torch.zeros(2, 3, 4, 5)).shape == (6, 4, 5)
