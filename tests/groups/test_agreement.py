"""Ranks that ask alike go on together; else every rank raises, in bounded time, all alike.

A thread stands for each rank: a round needs nothing but the store that they share.
"""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, TCPStore

from megablocks_core.groups.agreement import agree, agree_through
from megablocks_core.testing import ranks

SOON = timedelta(seconds=0.6)
LONG = timedelta(seconds=30)


@pytest.fixture(params=["hash", "file", "tcp"])
def connect(request, tmp_path):
    """How a rank reaches the store; a client of its own, where the store has clients."""
    if request.param == "hash":
        return always(HashStore())
    if request.param == "file":
        return lambda: FileStore(str(tmp_path / "store"))
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return lambda: TCPStore("127.0.0.1", server.port, is_master=False)


def always(store):
    return lambda: store


def together(connect, calls, *, timeout, delays=()):
    """Let rank r ask for each of ``calls[r]`` in turn; an answer is "yes" or the error's text."""

    def one_rank(rank):
        time.sleep(delays[rank] if delays else 0.0)
        answers, store = [], connect()
        for request in calls[rank]:
            try:
                agree_through(store, request, rank=rank, world_size=len(calls), timeout=timeout)
                answers.append("yes")
            except RuntimeError as error:
                answers.append(str(error))
        return answers

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(one_rank, range(len(calls))))


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_ranks_that_ask_alike_go_on(connect, world_size):
    asked = ["tp", "dp", "tp", "a name\nwith spaces"]
    answers = together(connect, [asked] * world_size, timeout=LONG)
    assert answers == [["yes"] * len(asked)] * world_size


def test_ranks_that_ask_in_another_order_raise_everywhere_with_both_requests(connect):
    start = time.monotonic()
    answers = together(connect, [["tp"], ["dp"], ["tp"]], timeout=LONG)
    assert time.monotonic() - start < 10  # a difference is not waited out
    assert answers[0] == answers[1] == answers[2]
    for (answer,) in answers:
        assert "ranks must ask for the same groups in the same order" in answer
        assert "asks for tp" in answer and "asks for dp" in answer


def test_a_missing_rank_is_named_on_all_others_and_hears_of_it_late(connect):
    start = time.monotonic()
    answers = together(connect, [["tp"], ["tp"], ["dp"]], timeout=SOON, delays=[0, 0, 1.6])
    assert time.monotonic() - start < 10
    assert answers[0] == answers[1]
    assert "within 0.6 s" in answers[0][0]
    assert "asks for tp, ranks [2] for none" in answers[0][0]
    # The late rank raises at once, with the same text and its own request.
    assert answers[2] == [f"{answers[0][0]}; now rank 2 asks for dp"]
    assert together(connect, [["pp"]] * 3, timeout=LONG) == [["yes"]] * 3


def test_after_failures_the_ranks_are_in_step_again(connect):
    calls = [["tp", "dp", "pp"], ["dp", "tp", "pp"], ["tp", "tp", "pp"]]
    for answers in together(connect, calls, timeout=LONG):
        assert [answer == "yes" for answer in answers] == [False, False, True]
    together(connect, [["tp"], ["tp"], []], timeout=SOON)
    assert "ranks [2] for none" in together(connect, [[], [], ["tp"]], timeout=LONG)[2][0]
    assert together(connect, [["tp"]] * 3, timeout=LONG) == [["yes"]] * 3


@pytest.mark.parametrize("seed", range(8))
def test_whoever_comes_when_all_ranks_end_alike(seed):
    dice = random.Random(seed)
    connect = always(HashStore())
    delays = [dice.choice([0.0, 0.5, 0.6, 0.7]) for _ in range(4)]
    answers = [answer for (answer,) in together(connect, [["tp"]] * 4, timeout=SOON, delays=delays)]
    assert len({answer.split("; now rank")[0] for answer in answers}) == 1
    assert together(connect, [["dp"]] * 4, timeout=LONG) == [["yes"]] * 4


def test_the_store_does_not_grow():
    store = HashStore()
    together(always(store), [["warm up"]] * 3, timeout=LONG)
    keys = store.num_keys()
    calls = [f"request {n}" for n in range(50)]
    together(always(store), [calls, calls, calls[::-1]], timeout=LONG)
    assert store.num_keys() == keys


def test_a_store_that_is_gone_is_not_called_a_missing_rank():
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(agree_through, client, "tp", rank=0, world_size=2, timeout=LONG)
        time.sleep(0.5)
        del server
        with pytest.raises(dist.DistNetworkError):
            waiting.result(timeout=10)


@ranks(1, 3)
def test_agree_uses_the_store_of_the_world():
    agree("tp", timeout=LONG)
    if dist.get_world_size() > 1:
        with pytest.raises(RuntimeError, match="rank . asks for mine 0|rank . asks for mine 1"):
            agree(f"mine {dist.get_rank()}", timeout=LONG)
        dist.barrier()
    agree("dp", timeout=LONG)
