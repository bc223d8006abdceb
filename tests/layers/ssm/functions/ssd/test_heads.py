"""States pass from chunk to chunk, and are read."""

import torch
from torch.testing import assert_close

from megablocks_core.layers.ssm.functions.recurrences import ssd_recurrence
from megablocks_core.layers.ssm.functions.ssd.chunks import Chunks, Inputs
from megablocks_core.layers.ssm.functions.ssd.heads import Heads
from megablocks_core.layers.ssm.functions.ssd.plan import Region, plan_of
from megablocks_core.layers.ssm.functions.ssd.rooms import Rooms
from tests.layers.ssm.functions.ssd.cases import draw


def test_states_pass_on_and_are_read():
    x, dt, A, B, C, *_ = (each.detach() for each in draw(1, 20, 4, 2)[:5])
    inputs = Inputs(x, dt, A, B, C, None, None, None)
    region, rooms = Region(slice(0, 1), 0, 5, 4, 0, 0), Rooms(x, x.dtype)
    chunks = Chunks(inputs, region, x.dtype)
    (lane,) = plan_of(x, B, 4).lanes
    heads = Heads(inputs, chunks, region, lane, rooms, 2)
    assert [len(piece.x) for piece in heads.pieces] == [2, 2, 1]
    states = torch.zeros(3, 1, 4, 3, 4, dtype=torch.float64)
    for piece in heads.pieces:
        work = heads.works(len(piece.x))
        number = len(piece.x)
        heads.pass_on(piece, work, piece.x, states)
        heads.read(piece, work, states[: number + 1])
        for index in range(number):
            stop = 4 * (piece.some.start + index + 1)
            parts = [each[:, :stop] for each in (x, dt, B, C)]
            _, right = ssd_recurrence(*parts[:2], A, *parts[2:])
            assert_close(states[index + 1], right, rtol=0, atol=1e-12)
            token = C[0, stop - 4, 1]  # of the second group, as its first head reads it
            read = work.read[index, 0, 1, 0, 0]
            assert_close(read, states[index, 0, 2] @ token, rtol=0, atol=1e-12)
        states[0] = states[number]
