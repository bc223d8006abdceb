"""All ranks stop after one step, handlers come back, and no signal is swallowed."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from megablocks_core.groups import Mesh
from megablocks_core.testing import ranks
from megablocks_core.train import StopAfter


def send(number=signal.SIGTERM):
    os.kill(os.getpid(), number)


@ranks(1, 2, 4)
def test_a_signal_to_one_rank_stops_all_after_the_same_step():
    group = Mesh().group("dp")
    before = signal.getsignal(signal.SIGTERM)
    with StopAfter(group=group) as stop:
        for step in range(10):
            if step == 3 and group.rank == group.size - 1:
                send()
            if stop():
                break
        with CommDebugMode() as traffic:
            assert stop()  # and it stays so, without asking
    assert traffic.get_total_counts() == 0
    assert (step, stop.reason) == (3, "SIGTERM")
    assert signal.getsignal(signal.SIGTERM) == before


@ranks(2)
def test_the_time_is_up_for_all_when_it_is_for_one():
    group = Mesh().group("dp")
    stop = StopAfter(minutes=0 if dist.get_rank() == 1 else 60, signals=(), every=3, group=group)
    answers = []
    for _ in range(5):
        with CommDebugMode() as traffic:
            answers.append((stop(), traffic.get_total_counts()))
    assert answers == [(False, 0), (False, 0), (True, 1), (True, 0), (True, 0)]
    assert stop.reason.startswith("minutes=")


def test_the_minutes_count_from_when_it_was_made():
    stop = StopAfter(minutes=0.05 / 60, signals=())
    assert not stop()
    time.sleep(0.06)
    assert stop() and stop.reason == "minutes=0.0008333333333333334"
    assert not StopAfter(signals=())()


def test_the_handler_before_has_the_second_signal_and_comes_back():
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        ours = signal.getsignal(signal.SIGUSR1)
        with StopAfter(signals=(signal.SIGUSR1,)) as stop:
            assert signal.getsignal(signal.SIGUSR1) is not ours
            send(signal.SIGUSR1)
            assert heard == []
            send(signal.SIGUSR1)
            assert heard == [signal.SIGUSR1]
            assert stop() and stop.reason == "SIGUSR1"
        assert signal.getsignal(signal.SIGUSR1) is ours and len(heard) == 1
        with pytest.raises(KeyError), StopAfter(signals=(signal.SIGUSR1,)):
            raise KeyError
        assert signal.getsignal(signal.SIGUSR1) is ours
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_that_no_call_could_report_is_raised_on_leaving():
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        with StopAfter(signals=(signal.SIGUSR1,)) as stop:
            assert not stop()
            send(signal.SIGUSR1)
            assert heard == []
        assert heard == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_second_sigterm_ends_the_process_at_once():
    code = """
import os, signal, sys
from megablocks_core.train import StopAfter
with StopAfter() as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    sys.stdout.write("one")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGTERM)
    sys.stdout.write("two")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "one")


def test_outside_the_main_thread_it_says_so():
    found = []

    def run():
        try:
            with StopAfter():
                pass
        except ValueError as error:
            found.append(str(error))
        with StopAfter(minutes=0, signals=()) as stop:
            found.append(stop())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "must be () outside the main thread" in found[0] and found[1] is True


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match="minutes=-1 must not be negative"):
        StopAfter(minutes=-1)
    with pytest.raises(ValueError, match="every=0 must be a whole number of at least 1"):
        StopAfter(every=0)
    for every in (float("nan"), 1.5):
        with pytest.raises(ValueError, match=f"every={every} must be a whole number"):
            StopAfter(every=every)


def test_a_signal_named_twice_has_its_handler_back():
    before = signal.getsignal(signal.SIGUSR1)
    with StopAfter(signals=(signal.SIGUSR1, signal.SIGUSR1)):
        pass
    assert signal.getsignal(signal.SIGUSR1) == before


@pytest.mark.parametrize("bad", [signal.SIGKILL, 4096, "SIGTERM"])
def test_a_signal_that_cannot_be_handled_is_refused_and_handlers_come_back(bad):
    before = signal.getsignal(signal.SIGUSR1)
    stop = StopAfter(signals=(signal.SIGUSR1, bad))
    with pytest.raises(ValueError, match="must be signals that a program may handle, which"):
        stop.__enter__()
    assert signal.getsignal(signal.SIGUSR1) == before
