"""Segments are read straight into tensors that lie in one run, and otherwise passed on."""

import pytest
import torch

from megablocks_core.ckpt.manifest import Chunk, StoredAs
from megablocks_core.ckpt.plans.load_plan import plan_load
from megablocks_core.ckpt.plans.outlines import holdings, pack
from megablocks_core.ckpt.state.shares import Piece, Share
from megablocks_core.ckpt.transfer.segments import Memory
from megablocks_core.ckpt.transfer.windows import Windows


class _Stored:
    """A file of numbers in memory, and the targets that were asked for."""

    def __init__(self, name, values):
        self.values, self.targets = values, []
        chunk = Chunk("f", 0, (0,) * values.dim(), tuple(values.shape))
        self.manifest = self
        self.tensors = {name: StoredAs("F32", tuple(values.shape), [chunk])}

    def fill(self, file, targets):
        data = memoryview(self.values.numpy()).cast("B")
        for offset, memory in targets:
            memory[:] = data[offset : offset + memory.nbytes]
        self.targets += targets


def _load(share, values):
    stored = _Stored("a", values)
    wanted = holdings([pack([share.outline])])
    (work,) = plan_load(wanted, stored.tensors, 0, hosts=[0])
    read = Memory(stored, [share], Windows()).read(work)
    return [read.value(number) for number in range(len(work.cuts))], [
        memory for _, memory in stored.targets
    ]


VALUES = torch.arange(24.0).view(4, 6)


def _is_in(memory, tensor):
    start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    return tensor.data_ptr() <= start < tensor.data_ptr() + tensor.nbytes


def test_memory_in_runs_is_read_straight():
    tensor = torch.zeros(4, 6)
    halves = [(slice(0, 2), slice(0, 6)), (slice(2, 4), slice(0, 6))]
    for pieces in (
        [Piece((slice(0, 4), slice(0, 6)), tensor)],
        [Piece(box, tensor[box]) for box in halves],
        [Piece(box, tensor[other]) for box, other in zip(halves, halves[::-1], strict=True)],
    ):
        tensor.zero_()
        _, memories = _load(Share("a", tensor.dtype, (4, 6), pieces), VALUES)
        assert all(_is_in(memory, tensor) for memory in memories)
        for box, view in pieces:
            assert torch.equal(view, VALUES[box])


@pytest.mark.parametrize("kind", ["strided", "part", "cast"])
def test_other_memory_is_filled_from_what_was_read(kind):
    box = (slice(0, 4), slice(0, 6))
    tensor = torch.zeros(4, 6)
    if kind == "strided":
        tensor = torch.zeros(6, 4).T
    if kind == "part":
        box = (slice(1, 3), slice(2, 5))
        tensor = torch.zeros(2, 3)
    if kind == "cast":
        tensor = torch.zeros(4, 6, dtype=torch.bfloat16)
    pieces = [Piece(box, tensor)]
    cuts, (memory,) = _load(Share("a", tensor.dtype, (4, 6), pieces), VALUES)
    assert not _is_in(memory, tensor)
    for inner, view in pieces:
        assert torch.equal(view, VALUES[inner].to(view.dtype))
    assert torch.equal(torch.cat([cut.reshape(-1) for cut in cuts]), VALUES[box].reshape(-1))


def test_what_arrives_in_another_dtype_is_cast_at_the_end():
    tensor = torch.zeros(4, 6, dtype=torch.bfloat16)
    box = (slice(0, 4), slice(0, 6))
    share = Share("a", tensor.dtype, (4, 6), [Piece(box, tensor)])
    memory = Memory(_Stored("a", VALUES), [share], Windows())
    arriving = memory.arriving("a", (slice(1, 2), slice(0, 6)))
    assert arriving.dtype == torch.float32
    arriving.copy_(VALUES[1:2])
    assert not tensor.any()
    memory.settle()
    assert torch.equal(tensor[1], VALUES[1].bfloat16()) and not tensor[2:].any()


def test_blocks_pass_through_scratch_memory_a_few_at_a_time():
    values = torch.randn(7 * 2**20 + 5)
    tensor = torch.zeros(len(values), dtype=torch.bfloat16)
    box = (slice(0, len(values)),)
    _, memories = _load(Share("a", tensor.dtype, tuple(values.shape), [Piece(box, tensor)]), values)
    assert torch.equal(tensor, values.bfloat16())
    starts = {torch.frombuffer(memory, dtype=torch.uint8).data_ptr() for memory in memories}
    assert len(memories) == 8 and len(starts) == 4
