"""A load is planned so that each block is read once and every rank gets what it wants."""

import random
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.ckpt import load_plan, overlaps
from megablocks_core.ckpt.boxes import inside, lengths, whole_box
from megablocks_core.ckpt.load_plan import plan_load
from megablocks_core.ckpt.manifest import Chunk, StoredAs
from megablocks_core.ckpt.outlines import Outline, holdings, pack
from tests.ckpt.layouts import random_layout
from tests.ckpt.test_overlaps import random_files


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    for module in (load_plan, overlaps):
        monkeypatch.setattr(module, "BLOCK_BYTES", 64)


def _plans(held, stored, limit=2**26):
    wanted = holdings([pack(one) for one in held])
    return [
        plan_load(wanted, stored, rank, num_ranks=len(held), limit=limit)
        for rank in range(len(held))
    ]


def _check(held, stored, limit):
    """Play the plans of all ranks on numbered elements."""
    plans = _plans(held, stored, limit)
    numbers = {name: np.arange(prod(one.shape)).reshape(one.shape) for name, one in stored.items()}
    got = [{one.name: np.full(one.shape, -1) for one in held_} for held_ in held]
    readers: dict[tuple[str, int], int] = {}
    assert len({len(plan) for plan in plans}) == 1
    for turn in range(len(plans[0])):
        sent = {}
        for rank, plan in enumerate(plans):
            work = plan[turn]
            values = _read(work, numbers, held, rank, readers)
            for number in work.own:
                _put(got[rank], *values[number])
            for peer, cuts in work.outgoing.items():
                assert peer != rank
                sent[rank, peer] = [values[number] for number in cuts]
            _check_bound(held, work, values, limit)
        _deliver(plans, turn, sent, got)
    for held_, mine in zip(held, got, strict=True):
        for one in held_:
            wanted = np.full(one.shape, -1)
            for box in one.boxes:
                wanted[box] = numbers[one.name][box]
            assert np.array_equal(mine[one.name], wanted)
    return readers


def _read(work, numbers, held, rank, readers):
    """The values of all cuts; notes who reads each block."""
    runs = []
    for name, chunk, start, stop in work.segments:
        itemsize = held_dtype(held, name).itemsize
        block = (chunk.offset + start * itemsize) // 64
        assert block == (chunk.offset + stop * itemsize - 1) // 64
        assert readers.setdefault((chunk.file, block), rank) == rank
        runs.append(numbers[name][chunk.box].reshape(-1)[start:stop])
    assert len({(one.chunk, one.start) for one in work.segments}) == len(work.segments)
    return [_value(work, runs, number) for number in range(len(work.cuts))]


def _deliver(plans, turn, sent, got):
    for rank, plan in enumerate(plans):
        for peer, boxes in plan[turn].incoming.items():
            arrived = sent.pop((peer, rank))
            assert [one[:2] for one in arrived] == boxes
            for one in arrived:
                _put(got[rank], *one)
    assert not sent


def _value(work, runs, number):
    segment, run, box = work.cuts[number]
    one = work.segments[segment]
    values = runs[segment]
    # Runs of a segment follow each other.
    offset = np.ravel_multi_index([p.start for p in run], one.chunk.shape) if run else 0
    part = values[offset - one.start :][: prod(lengths(run))].reshape(lengths(run))
    return one.name, box, part[inside(inside(box, one.chunk.box), run)]


def _put(arrays, name, box, values):
    assert (arrays[name][box] == -1).all()
    arrays[name][box] = values


def _check_bound(held, work, values, limit):
    sizes = [value.size * held_dtype(held, name).itemsize for name, _, value in values]
    out = sum(sizes[number] for cuts in work.outgoing.values() for number in cuts)
    blocks = {
        (s.chunk.file, (s.chunk.offset + s.start * held_dtype(held, s.name).itemsize) // 64)
        for s in work.segments
    }
    come = sum(
        prod(lengths(box)) * held_dtype(held, name).itemsize
        for boxes in work.incoming.values()
        for name, box in boxes
    )
    assert out + 64 * len(blocks) + come <= limit or len(blocks) + len(work.incoming) == 1


def held_dtype(held, name):
    return next(one.dtype for held_ in held for one in held_ if one.name == name)


@given(st.integers(0, 2**32), st.integers(1, 6), st.sampled_from([1, 200, 2**20]))
def test_every_rank_gets_what_it_wants_and_a_block_is_read_once(seed, num_ranks, limit):
    dice = random.Random(seed)
    held = random_layout(dice, num_ranks, dice.randint(0, 6))
    shapes = {one.name: one for held_ in held for one in held_}
    stored = random_files(dice, [(one.name, one.dtype, one.shape) for one in shapes.values()])
    _check(held, stored, limit)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [64, 4096])
def test_random_layouts_on_many_ranks(num_ranks):
    for seed in range(2):
        dice = random.Random(seed)
        held = [one for one in random_layout(dice, num_ranks, 60, most_boxes=40) if one]
        shapes = {one.name: one for held_ in held for one in held_}
        stored = random_files(dice, [(one.name, one.dtype, one.shape) for one in shapes.values()])
        _check(held, stored, 1000)


def test_replicas_take_turns_and_the_rank_that_needs_most_reads():
    stored = {"m/a": StoredAs("F32", (80,), [Chunk("f", 64, (0,), (80,))])}
    whole = [Outline("m/a", torch.float32, (80,), [whole_box((80,))])]
    readers = _check([whole] * 2, stored, 2**20)
    assert readers == {("f", block): (block - 1) % 2 for block in range(1, 6)}
    most = [Outline("m/a", torch.float32, (80,), [(slice(0, 71),)])]
    rest = [Outline("m/a", torch.float32, (80,), [(slice(71, 80),)])]
    readers = _check([rest, most], stored, 2**20)
    assert [readers["f", block] for block in range(1, 6)] == [1, 1, 1, 1, 0]


def test_blocks_that_nobody_wants_are_not_read():
    chunk = Chunk("f", 64, (0, 0), (40, 8))
    stored = {"m/a": StoredAs("F32", (40, 8), [chunk])}
    columns = [Outline("m/a", torch.float32, (40, 8), [(slice(3, 5), slice(2, 4))])]
    readers = _check([columns], stored, 2**20)
    assert sorted(block for _, block in readers) == [2, 3]
    assert _plans([[]], stored) == [[]]
