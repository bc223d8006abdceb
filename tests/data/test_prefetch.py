"""Threads work ahead in order, carry errors to the caller, and end with their owner."""

import gc
import os
import signal
import threading
import time

import pytest

from megablocks_core.data.prefetch import Prefetch


def threads():
    return [t for t in threading.enumerate() if t.name.startswith("megablocks-data")]


def ended():
    """Wait until no thread is left."""
    for _ in range(200):
        gc.collect()
        if not threads():
            return True
        time.sleep(0.02)
    return False


def following(number):
    return number + 1 if number < 19 else None


@pytest.mark.parametrize("workers", [1, 3])
def test_results_come_in_order_and_few_wait(workers):
    begun, most = [], []

    def make(number):
        begun.append(number)
        time.sleep(0.002 * (number % 3))
        return number * number

    ahead = Prefetch(make, workers=workers, ahead=4)
    for number in range(20):
        assert ahead.get(number, following) == number * number
        most.append(max(begun) - number)
    assert sorted(begun) == list(range(20))
    assert max(most) <= 3


def test_an_error_is_raised_where_its_result_is_due_and_may_pass():
    broken = [True]

    def make(number):
        if number == 2 and broken:
            raise OSError("the disk is gone")
        return number

    ahead = Prefetch(make, workers=2, ahead=3)
    assert [ahead.get(number, following) for number in (0, 1)] == [0, 1]
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            ahead.get(2, following)
    broken.clear()
    assert [ahead.get(number, following) for number in (2, 3)] == [2, 3]


def test_another_place_starts_anew():
    ahead = Prefetch(lambda number: number, workers=1, ahead=3)
    assert ahead.get(0, following) == 0
    assert ahead.get(10, following) == 10
    assert ahead.get(11, following) == 11


def test_threads_end_when_the_owner_is_dropped():
    assert ended()
    release = threading.Event()
    ahead = Prefetch(lambda number: number == 0 or release.wait(5), workers=2, ahead=4)
    assert ahead.get(0, following) is True
    assert threads()
    del ahead
    release.set()
    assert ended()


def test_an_interrupt_loses_no_result_and_begins_nothing_more():
    calls = []

    def make(number):
        calls.append(number)
        time.sleep(0.3)
        return number

    ahead = Prefetch(make, workers=1, ahead=4)
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.1, lambda: signal.pthread_kill(main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        ahead.get(0, following)
    timer.join()
    time.sleep(0.5)
    assert calls == [0]
    assert ahead.get(0, lambda number: None) == 0
    assert calls == [0]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own():
    ahead = Prefetch(lambda number: number, workers=1, ahead=4)
    assert ahead.get(0, following) == 0
    child = os.fork()
    if child == 0:
        os._exit(0 if [ahead.get(number, following) for number in (1, 2)] == [1, 2] else 1)
    for _ in range(500):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.02)
    else:
        os.kill(child, 9)
        pytest.fail("the child waits for a thread that it does not have")
    assert status == 0
    assert ahead.get(1, following) == 1
