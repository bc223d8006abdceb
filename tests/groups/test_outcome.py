"""What one rank cannot do, no rank does."""

import signal
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import pytest

from megablocks_core.groups import LOCAL, Group, Mesh, interrupts_held, together
from megablocks_core.testing import ranks


def test_one_process_keeps_its_own_error():
    with pytest.raises(KeyError), together("task", group=LOCAL):
        raise KeyError("x")


@ranks(2)
def test_an_error_on_one_rank_raises_on_all():
    group = Mesh().group("dp")
    with (
        pytest.raises(OSError if group.rank == 1 else LookupError) as caught,
        together("write(f)", group=group, raises=LookupError),
    ):
        if group.rank == 1:
            raise OSError("disk full")
    if group.rank == 0:
        assert str(caught.value) == "write(f) failed on rank 1: OSError: disk full"


@ranks(2)
def test_a_value_error_is_one_everywhere():
    group = Mesh().group("dp")
    with (
        pytest.raises(ValueError, match="size=3"),
        together("check", group=group, raises=LookupError),
    ):
        if group.rank == 0:
            raise ValueError("size=3 must be even")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@ranks(2)
def test_what_ends_one_rank_is_told_to_the_others(kind):
    group = Mesh().group("dp")
    with (
        pytest.raises(kind if group.rank == 1 else LookupError) as caught,
        together("task", group=group, raises=LookupError),
    ):
        if group.rank == 1:
            raise kind
    if group.rank == 0:
        assert str(caught.value) == f"task failed on rank 1: {kind.__name__}"
    assert group.all_gather_object(group.rank) == [0, 1]


@ranks(2)
def test_ctrl_c_between_two_bodies_is_raised_in_the_next():
    """Where ranks talk an interrupt waits: the others would wait for what never comes."""
    group = Mesh().group("dp")
    kind = KeyboardInterrupt if group.rank == 1 else RuntimeError
    with ctrl_c_raises(), pytest.raises(kind) as caught, interrupts_held(group=group):
        for step in range(3):
            with together(f"step {step}", group=group):
                assert step < 2
            if group.rank == 1 and step == 0:
                signal.raise_signal(signal.SIGINT)
            group.all_gather_object(step)
    if group.rank == 0:
        assert str(caught.value) == "step 1 failed on rank 1: KeyboardInterrupt"


@ranks(2)
def test_ctrl_c_after_the_last_body_is_raised_at_the_end():
    group = Mesh().group("dp")
    raised = pytest.raises(KeyboardInterrupt) if group.rank == 1 else nullcontext()
    with ctrl_c_raises(), raised, interrupts_held(group=group):
        with together("task", group=group):
            pass
        if group.rank == 1:
            signal.raise_signal(signal.SIGINT)
        assert group.all_gather_object(1) == [1, 1]


@ranks(2)
def test_ctrl_c_in_a_body_that_must_end_is_raised_when_it_has():
    """Where one rank does the work of all, none may leave while it does."""
    group, done = Mesh().group("dp"), []
    raised = pytest.raises(KeyboardInterrupt) if group.rank == 1 else nullcontext()
    with ctrl_c_raises(), raised, interrupts_held(group=group):
        if group.rank == 1:
            signal.raise_signal(signal.SIGINT)
        with together("task", group=group, interruptible=False):
            if group.rank == 1:
                signal.raise_signal(signal.SIGINT)
            done.append(group.rank)
        assert group.all_gather_object(1) == [1, 1]
        done.append("told")
    assert done == [group.rank, "told"]


def test_ctrl_c_alone_is_raised_where_it_comes():
    with ctrl_c_raises(), pytest.raises(KeyboardInterrupt), interrupts_held(group=LOCAL):
        signal.raise_signal(signal.SIGINT)
        pytest.fail("it was held")


@pytest.mark.parametrize("rank", [0, 1])
@ranks(2)
def test_ctrl_c_while_ranks_agree_is_raised_when_they_have(rank):
    group = Mesh().group("dp")
    gather = Group.all_gather_object

    def interrupted(self, value):
        if group.rank == rank:
            signal.raise_signal(signal.SIGINT)
        return gather(self, value)

    raised = pytest.raises(KeyboardInterrupt) if group.rank == rank else nullcontext()
    with (
        ctrl_c_raises(),
        patch.object(Group, "all_gather_object", interrupted),
        raised,
        together("task", group=group),
    ):
        pass
    assert group.all_gather_object(1) == [1, 1]


@ranks(2)
def test_a_rank_that_is_gone_is_said():
    group = Mesh().group("dp")
    with (
        patch.object(Group, "all_gather_object", side_effect=RuntimeError("Connection closed")),
        pytest.raises(RuntimeError, match=r"^task: not all of ranks \[0, 1\] answer: Connection"),
        together("task", group=group),
    ):
        pass


@contextmanager
def ctrl_c_raises():
    """Workers ignore it; afterwards the handler is the one that was there before."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
