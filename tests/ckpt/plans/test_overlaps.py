"""What is needed of which block agrees with elements counted one by one."""

import random
from math import prod

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.ckpt.manifest import Chunk, StoredAs
from megablocks_core.ckpt.plans import overlaps
from megablocks_core.ckpt.plans.boxes import as_array, as_boxes, lengths, moved
from megablocks_core.ckpt.plans.outlines import Layout, holdings, pack
from megablocks_core.ckpt.plans.overlaps import before, find_needs, overlap
from tests.ckpt.layouts import random_layout, random_tiling
from tests.ckpt.plans.test_boxes import shapes_and_boxes

SEEDS = st.integers(0, 2**32)


@given(SEEDS)
def test_overlaps_are_all_that_cells_and_chunks_share(seed):
    dice = random.Random(seed)
    shape = tuple(dice.randint(1, 6) for _ in range(dice.randint(0, 3)))
    chunks = random_tiling(dice, shape, 6)
    mine = as_array(random_tiling(dice, shape, 6), len(shape))
    layout = Layout(shape, mine, np.zeros(len(mine), dtype=np.int64))
    found = overlap(layout, as_array(chunks, len(shape)))
    numbers = np.arange(prod(shape)).reshape(shape)
    seen = []
    for chunk, cell, box, start, stop in zip(
        found.chunks, found.cells, as_boxes(found.boxes), found.starts, found.stops, strict=True
    ):
        stored = numbers[chunks[chunk]]
        values = stored[box]
        assert np.isin(values, numbers[as_boxes(layout.cells)[cell]]).all()
        places = np.flatnonzero(np.isin(stored.reshape(-1), values))
        assert (places[0], places[-1] + 1) == (start, stop)
        assert np.array_equal(values, numbers[moved(box, chunks[chunk])])
        seen += values.reshape(-1).tolist()
    assert sorted(seen) == list(range(prod(shape)))


@given(shapes_and_boxes(max_boxes=1), st.data())
def test_before_counts(case, data):
    shape, (box,) = case
    place = data.draw(st.integers(0, prod(shape)))
    marked = np.zeros(shape, dtype=int)
    marked[box] = 1
    found = before(as_array([box], len(shape)), np.array([shape], dtype=int), np.array([place]))
    assert found.tolist() == [marked.reshape(-1)[:place].sum()]


@given(SEEDS, st.sampled_from([8, 24, 64]))
def test_needs_are_every_wanted_byte_once(seed, block_bytes):
    dice = random.Random(seed)
    wanted = holdings([pack(held) for held in random_layout(dice, 3, 5)])
    stored = random_files(dice, [(one.name, one.dtype, one.shape) for one in wanted])
    old, overlaps.BLOCK_BYTES = overlaps.BLOCK_BYTES, block_bytes
    try:
        needs, found = find_needs(wanted, stored)
    finally:
        overlaps.BLOCK_BYTES = old
    total = 0
    for need in zip(*needs, strict=True):
        tensor, chunk, cell, box, _, start, stop, nbytes, length = (int(value) for value in need)
        one = wanted[tensor]
        part = stored[one.name].chunks[chunk]
        marked = np.zeros(part.shape, dtype=int)
        marked[as_boxes(found[tensor].boxes)[box]] = 1
        assert marked.reshape(-1)[start:stop].sum() * one.dtype.itemsize == nbytes > 0
        assert found[tensor].cells[box] == cell and found[tensor].chunks[box] == chunk
        assert length == (stop - start) * one.dtype.itemsize
        begins = part.offset + start * one.dtype.itemsize
        ends = part.offset + stop * one.dtype.itemsize
        assert begins // block_bytes == (ends - 1) // block_bytes
        total += nbytes
    assert total == sum(int(one.layout.sizes.sum()) * one.dtype.itemsize for one in wanted)


def random_files(dice, tensors):
    """Chunks of tensors in two files, widest dtype first."""
    stored, ends = {}, {"a": 8 * dice.randint(1, 9), "b": 8}
    for name, dtype, shape in sorted(tensors, key=lambda one: -one[1].itemsize):
        chunks = []
        for box in random_tiling(dice, shape, dice.randint(1, 6)):
            file = dice.choice("ab")
            chunks.append(Chunk(file, ends[file], tuple(p.start for p in box), lengths(box)))
            ends[file] += prod(lengths(box)) * dtype.itemsize
        code = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16"}.get(dtype, "U8")
        stored[name] = StoredAs(code, shape, chunks)
    return stored
