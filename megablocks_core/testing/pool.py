"""Worker processes kept alive between tests, and the story told when a test goes wrong.

The pool grows to the largest size asked for; a test of ``n`` ranks runs on the first ``n``
workers. After any failure the workers that took part are killed, since one of them may sit
in a collective for ever, and the next test gets new ones.
"""

import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING

from megablocks_core.testing.starter import Forked, Starter
from megablocks_core.testing.worker import Answer, Job

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

START_TIMEOUT = 300.0  # importing torch on a crowded machine


class RanksError(AssertionError):
    """A body failed on some rank, hung, or its process died; the text tells which and where."""


@dataclass
class _Worker:
    rank: int
    process: subprocess.Popen[bytes] | Forked
    connection: Connection
    stacks: Path


class Pool:
    """Serves ``run(...)``; made once a session, closed at its end.

    Workers are forks of one process that has loaded torch, which takes seconds each time. With
    ``forks=False``, as CUDA may want it, each is a process of its own.
    """

    def __init__(self, *, forks: bool = sys.platform == "linux") -> None:
        self._forks = forks
        self._starter: Starter | None = None
        self._workers: dict[int, _Worker] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._num_jobs = 0
        self._served: TCPStore | None = None

    def run(
        self,
        *,
        file: str,
        module: str,
        qualname: str,
        payload: bytes,
        size: int,
        backend: str = "gloo",
        timeout: float = 60.0,
        mutation: str | None = None,
    ) -> list[Answer]:
        """Run the decorated test ``qualname`` of ``file`` on ``size`` ranks.

        ``payload`` is the pickle of its keyword arguments; ``mutation`` names a fault under
        which to run it. Returns the answers by rank.

        Raises:
            RanksError: The first rank that failed, or the ranks that gave no answer.
        """
        self._num_jobs += 1
        job = Job(
            file=file,
            module=module,
            qualname=qualname,
            payload=payload,
            size=size,
            backend=backend,
            port=self._store().port,
            number=self._num_jobs,
            timeout=timeout,
            sys_path=tuple(sys.path),
            mutation=mutation,
        )
        workers = self._start(size)
        try:
            for worker in workers:
                worker.connection.send(job)
            answers = self._collect(workers, job)
        except BaseException:
            self._kill(workers)
            raise
        for worker in workers:
            worker.connection.send(None)  # leave the world while pytest goes on
        return answers

    def close(self) -> None:
        """End every worker."""
        self._kill(list(self._workers.values()))
        if self._starter is not None:
            self._starter.close()
        self._folder.cleanup()

    def _store(self) -> "TCPStore":
        """Return the store where ranks meet. It lives here, so that no rank's end takes it along.

        (One of files is looked at every 10 ms: each world and each group then waits for that.)
        """
        if self._served is None:
            from torch._C._distributed_c10d import TCPStore

            self._served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return self._served

    def _start(self, size: int) -> list[_Worker]:
        new = [self._spawn(rank) for rank in range(size) if rank not in self._workers]
        for worker in new:
            if not worker.connection.poll(START_TIMEOUT):
                self._kill(new)
                raise RanksError(f"rank {worker.rank} did not start within {START_TIMEOUT:.0f} s")
            try:
                worker.connection.recv()
            except EOFError:
                code = worker.process.wait()
                self._kill(new)
                raise RanksError(f"rank {worker.rank} died at start, exit code {code}") from None
        return [self._workers[rank] for rank in range(size)]

    def _spawn(self, rank: int) -> _Worker:
        ours, theirs = socket.socketpair()
        stacks = Path(self._folder.name) / f"stacks-{rank}"
        with theirs:
            process = self._process(theirs.fileno(), rank, str(stacks))
        worker = _Worker(rank, process, Connection(ours.detach()), stacks)
        self._workers[rank] = worker
        return worker

    def _process(self, fd: int, rank: int, stacks: str) -> "subprocess.Popen[bytes] | Forked":
        if self._forks:
            self._starter = self._starter or Starter()
            try:
                return self._starter.start(fd, rank, stacks, timeout=START_TIMEOUT)
            except (EOFError, OSError) as error:
                raise RanksError(f"no process to start rank {rank}: {error!r}") from None
        code = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            "from megablocks_core.testing.worker import serve\n"
            f"serve({fd}, {rank}, {stacks!r})"
        )
        return subprocess.Popen([sys.executable, "-c", code], pass_fds=[fd])

    def _collect(self, workers: Sequence[_Worker], job: Job) -> list[Answer]:
        answers: dict[int, Answer] = {}
        waiting = {worker.connection: worker for worker in workers}
        deadline = time.monotonic() + job.timeout
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RanksError(_hang(list(waiting.values()), answers, job))
            for connection in ready:
                worker = waiting.pop(connection)  # type: ignore[arg-type]
                answers[worker.rank] = _answer(worker, workers)
        return [answers[rank] for rank in range(job.size)]

    def _kill(self, workers: Sequence[_Worker]) -> None:
        for worker in workers:
            worker.process.send_signal(signal.SIGKILL)
        for worker in workers:
            worker.process.wait()
            worker.connection.close()
            self._workers.pop(worker.rank, None)


def _answer(worker: _Worker, workers: Sequence[_Worker]) -> Answer:
    """Return the worker's answer; raise if it is a failure: the first to report is the cause.

    A peer's death comes before the error that it brings about here.
    """
    try:
        answer = worker.connection.recv()
    except (EOFError, ConnectionError):
        worker.process.wait()
        answer = Answer("failed", "", "")
    for peer in workers:
        code = peer.process.poll()
        if code is not None:
            end = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            stack = peer.stacks.read_text()
            raise RanksError(f"rank {peer.rank} of {len(workers)} died ({end})\n{stack}")
    if answer.outcome == "failed":
        output = f"\nOutput of rank {worker.rank}:\n{answer.output}" if answer.output else ""
        raise RanksError(
            f"rank {worker.rank} of {len(workers)} failed first:\n\n{answer.text}{output}"
        )
    return answer


def _hang(stuck: Sequence[_Worker], answers: dict[int, Answer], job: Job) -> str:
    """Tell which ranks gave no answer and where in Python each of them stands."""
    for worker in stuck:
        worker.process.send_signal(signal.SIGUSR1)
    time.sleep(0.5)  # faulthandler writes from the signal handler
    names = ", ".join(str(worker.rank) for worker in stuck)
    done = ", ".join(f"{rank} {answer.outcome}" for rank, answer in sorted(answers.items()))
    lines = [
        f"no answer within {job.timeout:g} s from rank {names} of {job.size}"
        f" (others: {done or 'none'})"
    ]
    for worker in stuck:
        lines.append(f"\nrank {worker.rank} stands at\n{worker.stacks.read_text()}")
    return "\n".join(lines)
