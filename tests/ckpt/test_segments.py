"""Segments are read straight into tensors that lie in one run, and otherwise passed on."""

import pytest
import torch

from megablocks_core.ckpt.load_plan import plan_load
from megablocks_core.ckpt.manifest import Chunk, StoredAs
from megablocks_core.ckpt.outlines import holdings, pack
from megablocks_core.ckpt.segments import Memory
from megablocks_core.ckpt.shares import Piece, Share


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
    (work,) = plan_load(wanted, stored.tensors, 0, num_ranks=1)
    read = Memory(stored, [share]).read(work)
    return [read.value(number) for number in range(len(work.cuts))], [
        memory for _, memory in stored.targets
    ]


VALUES = torch.arange(24.0).view(4, 6)


def _is_in(memory, tensor):
    start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    return tensor.data_ptr() <= start < tensor.data_ptr() + tensor.nbytes


def test_memory_in_one_run_is_read_straight():
    tensor = torch.zeros(4, 6)
    halves = [(slice(0, 2), slice(0, 6)), (slice(2, 4), slice(0, 6))]
    for pieces in (
        [Piece((slice(0, 4), slice(0, 6)), tensor)],
        [Piece(box, tensor[box]) for box in halves],
    ):
        tensor.zero_()
        _, (memory,) = _load(Share("a", tensor.dtype, (4, 6), pieces), VALUES)
        assert _is_in(memory, tensor) and torch.equal(tensor, VALUES)


@pytest.mark.parametrize("kind", ["strided", "part", "cast", "apart"])
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
    if kind == "apart":  # in the order of memory the halves are exchanged
        pieces = [
            Piece((slice(0, 2), slice(0, 6)), tensor[2:]),
            Piece((slice(2, 4), slice(0, 6)), tensor[:2]),
        ]
    cuts, (memory,) = _load(Share("a", tensor.dtype, (4, 6), pieces), VALUES)
    assert not _is_in(memory, tensor)
    for inner, view in pieces:
        assert torch.equal(view, VALUES[inner].to(view.dtype))
    assert torch.equal(torch.cat([cut.reshape(-1) for cut in cuts]), VALUES[box].reshape(-1))


def test_what_arrives_in_another_dtype_is_cast_at_the_end():
    tensor = torch.zeros(4, 6, dtype=torch.bfloat16)
    box = (slice(0, 4), slice(0, 6))
    share = Share("a", tensor.dtype, (4, 6), [Piece(box, tensor)])
    memory = Memory(_Stored("a", VALUES), [share])
    arriving = memory.arriving("a", (slice(1, 2), slice(0, 6)))
    assert arriving.dtype == torch.float32
    arriving.copy_(VALUES[1:2])
    assert not tensor.any()
    memory.settle()
    assert torch.equal(tensor[1], VALUES[1].bfloat16()) and not tensor[2:].any()
