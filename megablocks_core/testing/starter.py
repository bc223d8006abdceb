"""A process that has loaded what every rank loads, and forks a rank whenever it is asked.

Loading torch and its compiler takes seconds, in each process anew. This one does that and nothing
else: forks of a process that has run a backward pass lack its threads, and hang.
"""

import gc
import importlib
import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle

from megablocks_core.testing.worker import prepare, serve

# What shows the values of an assert; and what torch loads for DTensor, and when it first compiles.
LOADED = (
    "_pytest.assertion.rewrite",
    "pytest",
    "torch.distributed.tensor",
    "torch._dynamo.backends.debugging",
    "torch._inductor.lowering",
)


class Starter:
    """Starts workers; the process behind it ends when the one that made it does.

    Its methods raise EOFError or OSError if that process has ended.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            "from megablocks_core.testing.starter import fork_when_asked\n"
            f"fork_when_asked({theirs.fileno()})"
        )
        self._process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()])
        theirs.close()
        self._connection = Connection(ours.detach())

    def start(self, fd: int, rank: int, stacks: str, *, timeout: float) -> "Forked":
        """Fork a process that calls ``serve(fd, rank, stacks)``, with a copy of ``fd``."""
        self._connection.send((rank, stacks))
        send_handle(self._connection, fd, self._process.pid)
        if not self._connection.poll(timeout):
            raise TimeoutError(f"it has not loaded torch within {timeout:.0f} s")
        return Forked(self._connection.recv(), self)

    def code(self, pid: int, *, wait: bool) -> int | None:
        """Return a worker's exit code (a signal's is negative), or ``None`` if it still runs."""
        self._connection.send((pid, wait))
        return self._connection.recv()

    def close(self) -> None:
        """End the process behind it."""
        self._connection.close()
        self._process.wait()


class Forked:
    """One worker, with what the pool uses of ``subprocess.Popen``."""

    def __init__(self, pid: int, starter: Starter) -> None:
        self.returncode: int | None = None
        self._pid = pid
        self._starter = starter

    def poll(self) -> int | None:
        """Return its exit code, or ``None`` if it still runs."""
        if self.returncode is None:
            self.returncode = self._starter.code(self._pid, wait=False)
        return self.returncode

    def wait(self) -> int | None:
        """Wait for its end; return its exit code."""
        if self.returncode is None:
            self.returncode = self._starter.code(self._pid, wait=True)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if self.poll() is None:  # until then nobody else has its number
            os.kill(self._pid, number)


def fork_when_asked(fd: int) -> None:
    """Serve a ``Starter`` over socket ``fd`` until it is gone."""
    prepare()
    for name in LOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else whatever collects garbage looks through all of torch, and copies it
    pool = Connection(fd)
    while True:
        try:
            request = pool.recv()
        except EOFError:
            os._exit(0)  # extensions would complain of what is frozen
        if isinstance(request[1], bool):
            pid, wait = request
            ended, status = os.waitpid(pid, 0 if wait else os.WNOHANG)
            pool.send(os.waitstatus_to_exitcode(status) if ended else None)
            continue
        worker = recv_handle(pool)
        pid = os.fork()
        if not pid:
            pool.close()
            serve(worker, *request)
        os.close(worker)
        pool.send(pid)
