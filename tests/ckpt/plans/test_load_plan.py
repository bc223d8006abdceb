"""A load is planned so that each block is read once and every rank gets what it wants."""

import random
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.ckpt.manifest import Chunk, StoredAs
from megablocks_core.ckpt.plans import overlaps
from megablocks_core.ckpt.plans.boxes import inside, lengths, whole_box
from megablocks_core.ckpt.plans.load_plan import plan_load
from megablocks_core.ckpt.plans.outlines import Outline, holdings, pack
from tests.ckpt.layouts import random_layout
from tests.ckpt.plans.test_overlaps import random_files


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(overlaps, "BLOCK_BYTES", 64)


def _plans(held, stored, limit=2**26, hosts=None):
    wanted = holdings([pack(one) for one in held])
    hosts = range(len(held)) if hosts is None else hosts
    return [plan_load(wanted, stored, rank, hosts=hosts, limit=limit) for rank in range(len(held))]


def _check(held, stored, limit, hosts=None):
    """Play the plans of all ranks on numbered elements."""
    plans = _plans(held, stored, limit, hosts)
    numbers = {name: np.arange(prod(one.shape)).reshape(one.shape) for name, one in stored.items()}
    got = [{one.name: np.full(one.shape, -1) for one in held_} for held_ in held]
    readers: dict[tuple[str, int], int] = {}
    # By rank and byte: which element of which tensor a window holds there.
    windows: list[dict[int, object]] = [{} for _ in held]
    assert len({len(plan) for plan in plans}) == 1
    _check_windows(plans, held)
    for turn in range(len(plans[0])):
        sent = {}
        for rank, plan in enumerate(plans):
            work = plan[turn]
            values = _read(work, numbers, held, rank, readers)
            _show(work, held, windows[rank])
            for number in work.own:
                _put(got[rank], *values[number])
            for peer, cuts in work.outgoing.items():
                assert peer != rank and (hosts is None or hosts[peer] != hosts[rank])
                sent[rank, peer] = [values[number] for number in cuts]
            _check_bound(held, work, values, limit)
        _deliver(plans, turn, sent, got)
        # Windows may be looked at until the next round has been read.
        if turn:
            _look(plans, turn - 1, numbers, held, windows, got)
    if plans[0]:
        _look(plans, len(plans[0]) - 1, numbers, held, windows, got)
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
    return [
        (work.segments[one].name, *_value(work.segments[one], runs[one], part))
        for one, part in work.cuts
    ]


def _show(work, held, window):
    """Fill a window as the round says; its segments of one round do not overlap."""
    filled = set()
    for place, (name, chunk, start, stop) in zip(work.places, work.segments, strict=True):
        itemsize = held_dtype(held, name).itemsize
        if place >= 0:
            assert place % itemsize == 0
            span = set(range(place, place + (stop - start) * itemsize))
            assert not span & filled
            filled |= span
            for number in range(start, stop):
                window[place + (number - start) * itemsize] = (name, chunk, number)


def _check_windows(plans, held):
    """A window is no longer than the fullest round asks, twice."""
    for plan in plans:
        ends, fullest = [0], 0
        for work in plan:
            sizes = [
                (one.stop - one.start) * held_dtype(held, one.name).itemsize
                for one in work.segments
            ]
            shown = [
                (place, size) for place, size in zip(work.places, sizes, strict=True) if place >= 0
            ]
            ends += [place + size for place, size in shown]
            fullest = max(fullest, sum(size + -size % 64 for _, size in shown))
        assert max(ends) <= 2 * fullest


def _look(plans, turn, numbers, held, windows, got):
    for rank, plan in enumerate(plans):
        for peer, place, segment, parts in plan[turn].seen:
            name, chunk, start, stop = segment
            itemsize = held_dtype(held, name).itemsize
            for number in range(start, stop):
                there = windows[peer][place + (number - start) * itemsize]
                assert there == (name, chunk, number)
            run = numbers[name][chunk.box].reshape(-1)[start:stop]
            for part in parts:
                _put(got[rank], name, *_value(segment, run, part))


def _deliver(plans, turn, sent, got):
    for rank, plan in enumerate(plans):
        for peer, boxes in plan[turn].incoming.items():
            arrived = sent.pop((peer, rank))
            assert [one[:2] for one in arrived] == boxes
            for one in arrived:
                _put(got[rank], *one)
    assert not sent


def _value(segment, run, part):
    # Runs of a segment follow each other.
    chunk, lies = segment.chunk, lengths(part.run)
    offset = np.ravel_multi_index([one.start for one in part.run], chunk.shape) if part.run else 0
    values = run[offset - segment.start :][: prod(lies)].reshape(lies)
    return part.box, values[inside(inside(part.box, chunk.box), part.run)]


def _put(arrays, name, box, values):
    assert (arrays[name][box] == -1).all()
    arrays[name][box] = values


def _check_bound(held, work, values, limit):
    """What a rank holds for others and from others stays below the limit, or is of one block."""
    sizes = [value.size * held_dtype(held, name).itemsize for name, _, value in values]
    out = sum(sizes[number] for cuts in work.outgoing.values() for number in cuts)
    sent = {work.cuts[number].segment for cuts in work.outgoing.values() for number in cuts}
    blocks, passing = set(), 0
    for number, (name, chunk, start, stop) in enumerate(work.segments):
        itemsize = held_dtype(held, name).itemsize
        if number in sent or work.places[number] >= 0:
            passing += (stop - start) * itemsize
            blocks.add((chunk.file, (chunk.offset + start * itemsize) // 64))
    come = sum(
        prod(lengths(box)) * held_dtype(held, name).itemsize
        for boxes in work.incoming.values()
        for name, box in boxes
    )
    assert out + passing + come <= limit or len(blocks) + len(work.incoming) == 1


def held_dtype(held, name):
    return next(one.dtype for held_ in held for one in held_ if one.name == name)


@given(st.integers(0, 2**32), st.integers(1, 6), st.sampled_from([1, 300, 2**20]))
def test_every_rank_gets_what_it_wants_and_a_block_is_read_once(seed, num_ranks, limit):
    dice = random.Random(seed)
    held = random_layout(dice, num_ranks, dice.randint(0, 6))
    shapes = {one.name: one for held_ in held for one in held_}
    stored = random_files(dice, [(one.name, one.dtype, one.shape) for one in shapes.values()])
    num_hosts = dice.randint(1, num_ranks)
    _check(held, stored, limit, hosts=[dice.randrange(num_hosts) for _ in held])


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [64, 4096])
def test_random_layouts_on_many_ranks(num_ranks):
    for seed in range(2):
        dice = random.Random(seed)
        held = [one for one in random_layout(dice, num_ranks, 60, most_boxes=40) if one]
        shapes = {one.name: one for held_ in held for one in held_}
        stored = random_files(dice, [(one.name, one.dtype, one.shape) for one in shapes.values()])
        for hosts in (range(num_ranks), [rank // 8 for rank in range(num_ranks)]):
            _check(held, stored, 1000, hosts)


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


def test_rows_cut_elsewhere_go_straight_to_those_who_want_them():
    """Between two shares lies a block: one rank reads it and shows what the other wants of it."""
    stored = {"m/a": StoredAs("F32", (10, 16), [Chunk("f", 32, (0, 0), (10, 16))])}
    rows = [
        [Outline("m/a", torch.float32, (10, 16), [(span, slice(0, 16))])]
        for span in (slice(0, 5), slice(5, 10))
    ]
    (first,), (second,) = _plans(rows, stored, hosts=[0, 0])
    seen = [(one.segment.start, one.segment.stop) for one in first.seen + second.seen]
    assert seen == [(72, 80)] or seen == [(80, 88)]
    assert sum(place >= 0 for place in first.places + second.places) == 1
    assert not any(work.outgoing or work.incoming for work in (first, second))
    (first,), (second,) = _plans(rows, stored)
    assert not first.seen and not second.seen
    assert sum(len(cuts) for cuts in (*first.outgoing.values(), *second.outgoing.values())) == 1
