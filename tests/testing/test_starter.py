"""Workers are forks of one process; the pool hears of their ends and of its."""

import os
import signal
import socket
from multiprocessing.connection import Connection

import pytest

from megablocks_core.testing.pool import Pool, RanksError
from megablocks_core.testing.ranks import pool_of
from megablocks_core.testing.starter import Starter


@pytest.fixture
def started(request, tmp_path):
    """A worker, and the socket over which it serves."""
    pool = pool_of(request.config, "gloo")
    pool._start(1)
    ours, theirs = socket.socketpair()
    with theirs:
        stacks = str(tmp_path / "stacks")
        worker = pool._starter.start(theirs.fileno(), 0, stacks, timeout=300)
    connection = Connection(ours.detach())
    assert connection.recv() is None  # it is ready
    yield worker, connection
    connection.close()


def test_it_runs_until_a_signal_ends_it(started):
    worker, _ = started
    assert worker.poll() is None
    worker.send_signal(signal.SIGKILL)
    assert worker.wait() == worker.poll() == -signal.SIGKILL
    worker.send_signal(signal.SIGKILL)  # nobody is hit: another may have its number


def test_it_leaves_when_its_socket_closes(started):
    worker, connection = started
    connection.close()
    assert worker.wait() == 1


def test_where_the_process_behind_it_ends_the_pool_says_so(monkeypatch):
    monkeypatch.setattr(Starter, "__init__", _ends_at_once)
    pool = Pool()
    try:
        with pytest.raises(RanksError, match="no process to start rank 0"):
            pool._start(1)
    finally:
        pool.close()


def _ends_at_once(starter):
    ours, theirs = socket.socketpair()
    theirs.close()
    starter._connection = Connection(ours.detach())
    starter._process = _Ended()


class _Ended:
    pid = os.getpid()

    def wait(self):
        return 1
