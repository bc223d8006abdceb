"""A save is planned so that every element is written once, by ranks that share the work."""

import random
from collections import Counter
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.ckpt.plans.boxes import lengths, whole_box
from megablocks_core.ckpt.plans.outlines import Outline, holdings, pack
from megablocks_core.ckpt.plans.save_plan import plan_save
from tests.ckpt.layouts import random_layout

SEEDS = st.integers(0, 2**32)


def _plans(held, *, ranks=None, limit=2**26):
    tensors = holdings([pack(one) for one in held])
    return [
        plan_save(tensors, rank, num_ranks=len(held), limit=limit)
        for rank in (range(len(held)) if ranks is None else ranks)
    ]


def _holds(outlines, name, box):
    return any(
        one.name == name
        and (
            box == whole_box(one.shape)
            and not prod(one.shape)
            or any(
                all(
                    outer.start <= part.start and part.stop <= outer.stop
                    for outer, part in zip(mine, box, strict=True)
                )
                for mine in one.boxes
            )
        )
        for one in outlines
    )


def _check(held, limit):
    """Play the plans of all ranks, painting what is written."""
    plans = _plans(held, limit=limit)
    painted = {one.name: np.zeros(one.shape, dtype=int) for held_ in held for one in held_}
    times = Counter()
    for rank, plan in enumerate(plans):
        assert len(plan.rounds) == len(plans[0].rounds)
        assert plan.homes == plans[0].homes
        for tensor, boxes in [*_brought_together(plan), *((t, [box]) for t, box in plan.pieces)]:
            times[tensor.name] += 1
            if tensor.whole:
                assert plan.homes[tensor.name] == rank
            for box in boxes:
                painted[tensor.name][box] += 1
        for tensor, box in [*plan.pieces, *((w.tensor, box) for w in plan.wholes for box in w.own)]:
            assert _holds(held[rank], tensor.name, box)
        for tensors in (plan.wholes, plan.pieces):
            widths = [one.tensor.dtype.itemsize for one in tensors]
            assert widths == sorted(widths, reverse=True)
    assert all((counts == 1).all() for counts in painted.values())
    assert all(times[one.name] == 1 for held_ in held for one in held_ if one.whole)
    _check_transfers(held, plans)
    _check_bounds(held, plans, limit)


def _brought_together(plan):
    """Each whole tensor with the boxes that it is made of once its last round is over."""
    arrived = {}
    for work in plan.rounds:
        for name, box, _ in work.incoming:
            arrived.setdefault(name, []).append(box)
        for tensor, own in work.complete:
            yield tensor, [*own, *arrived.pop(tensor.name, [])]
    assert not arrived and plan.wholes == [one for work in plan.rounds for one in work.complete]


def _check_transfers(held, plans):
    """Both sides name the same boxes in the same order, and the sender holds them."""
    outgoing, incoming = {}, {}
    for rank, plan in enumerate(plans):
        for number, work in enumerate(plan.rounds):
            for name, box, peer in work.outgoing:
                assert peer != rank and _holds(held[rank], name, box)
                outgoing.setdefault((number, rank, peer), []).append((name, box))
            for name, box, peer in work.incoming:
                incoming.setdefault((number, peer, rank), []).append((name, box))
    assert outgoing == incoming


def _check_bounds(held, plans, limit):
    dtypes = {one.name: one.dtype for held_ in held for one in held_}
    for plan in plans:
        for work in plan.rounds:
            out = [prod(lengths(box)) * dtypes[name].itemsize for name, box, _ in work.outgoing]
            come = [prod(lengths(box)) * dtypes[name].itemsize for name, box, _ in work.incoming]
            jobs = len({(name, peer) for name, _, peer in work.outgoing})
            jobs += len({name for name, _, _ in work.incoming})
            assert sum(out) + sum(come) <= max(limit, 8) or jobs == 1


@given(SEEDS, st.integers(1, 6), st.integers(0, 8), st.sampled_from([1, 16, 100, 2**20]))
def test_every_element_is_written_once_from_where_it_lies(seed, num_ranks, num_tensors, limit):
    _check(random_layout(random.Random(seed), num_ranks, num_tensors), limit)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [64, 4096])
def test_random_layouts_on_many_ranks(num_ranks):
    for seed in range(3):
        dice = random.Random(seed)
        held = random_layout(dice, num_ranks, 60, most_boxes=40)
        held = [one for one in held if one] + [[]]  # the plan of an idle rank costs as much
        _check(held, 64)


def test_f160_one_writer_for_replicas_slices_and_experts():
    """dp 2 x tp 2: a replicated norm, a weight cut over tp, experts cut over dp."""
    rows = [(slice(0, 4), slice(0, 6)), (slice(4, 8), slice(0, 6))]
    held = [
        [
            Outline("m/norm", torch.float32, (6,), [(slice(0, 6),)]),
            Outline("m/weight", torch.float32, (8, 6), [rows[rank % 2]]),
            Outline(f"m/experts.{rank // 2}.weight", torch.float32, (4,), [(slice(0, 4),)]),
            Outline("o/norm", torch.float32, (6,), [(slice(0, 6),)], whole=False),
            Outline("o/weight", torch.float32, (8, 6), [rows[rank % 2]], whole=False),
        ]
        for rank in range(4)
    ]
    _check(held, 2**20)
    plans = _plans(held)
    # The weight's writer has most to do, so the others share the rest.
    written = [
        sum(one.tensor.nbytes for one in plan.wholes)
        + sum(4 * prod(lengths(one.box)) for one in plan.pieces)
        for plan in plans
    ]
    assert sum(written) == 4 * (6 + 48 + 8 + 6 + 48) and max(written) == 192


@pytest.mark.parametrize("whole", [True, False])
def test_f160_elements_that_no_rank_holds_are_refused(whole):
    held = [
        [Outline("m/weight", torch.float32, (8,), [(slice(3 * rank, 3 * rank + 3),)], whole)]
        for rank in range(2)
    ]
    with pytest.raises(ValueError, match="m/weight: the group holds 6 of the 8 elements of shape"):
        _plans(held)


@given(SEEDS, st.integers(1, 8))
def test_replicated_tensors_are_balanced_by_bytes(seed, num_ranks):
    dice = random.Random(seed)
    shapes = [(dice.randint(1, 50),) for _ in range(dice.randint(1, 30))]
    held = [
        Outline(f"e/{index}", torch.uint8, shape, [whole_box(shape)], dice.random() < 0.5)
        for index, shape in enumerate(shapes)
    ]
    load = [
        sum(one.tensor.nbytes for one in [*plan.wholes, *plan.pieces])
        for plan in _plans([held] * num_ranks)
    ]
    assert sum(load) == sum(length for (length,) in shapes)
    assert max(load) - min(load) <= max(length for (length,) in shapes)


def test_a_tensor_larger_than_a_bucket_travels_in_several_rounds():
    halves = [(slice(0, 8), slice(0, 10)), (slice(8, 16), slice(0, 10))]
    held = [[Outline("m/a", torch.float32, (16, 10), [half])] for half in halves]
    (writer, other) = _plans(held, limit=80)
    assert [len(work.outgoing) for work in other.rounds] == [1, 1, 1, 1]
    assert [len(work.complete) for work in writer.rounds] == [0, 0, 0, 1]
    _check(held, 80)
