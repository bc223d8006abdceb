"""Worker processes, and their answers in order.

They are started by ``subprocess``, not ``multiprocessing``: so a script that calls ``tokenize``
needs no guard, each has one thread whatever the engine, and none outlives this process, which it
sees die as the end of its socket.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Protocol

from megablocks_core.data.tokenize.worker import Failure, Opens

_AHEAD = 2  # units a worker holds, the next one while it encodes
_WINDOW = 4  # units a worker that may wait for an earlier one
_ONE_THREAD = ("RAYON_NUM_THREADS=1", "TOKENIZERS_PARALLELISM=false", "OMP_NUM_THREADS=1")
_START = """
import sys
sys.path[:] = {path!r}
from megablocks_core.data.tokenize.worker import serve
serve({descriptor})
"""


class Workers(Protocol):
    """Encodes units."""

    def encode(self, units: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
        """Each unit with what is written of it, in their order."""
        ...

    def close(self) -> None:
        """Nothing more is asked."""
        ...


class OwnProcess:
    """The plain twin: encodes one unit after another here."""

    def __init__(self, settings: Opens) -> None:
        self._encoder = settings.open()

    def encode(self, units: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
        """Each unit with what is written of it, in their order."""
        for unit in units:
            yield unit, self._encoder.encode(unit)

    def close(self) -> None:
        """There is nothing to end."""


class Pool:
    """Encodes units in ``workers`` processes.

    At most ``4 workers`` units are under way or wait for an earlier one.

    Args:
        settings: Open an encoder in each. With ``None`` the processes start, and ``begin`` is
            called before anything is encoded.
        workers: How many.

    Raises:
        RuntimeError: A worker ended, or failed of what is no fault of the input.
        OSError: An input cannot be read.
    """

    def __init__(self, settings: Opens | None, workers: int) -> None:
        self._processes: list[subprocess.Popen] = []
        self._connections: list[Connection] = []
        try:
            for _ in range(workers):
                self._start()
            if settings is not None:
                self.begin(settings)
        except BaseException:
            self.close()
            raise

    def begin(self, settings: Opens) -> None:
        """Open an encoder in each process."""
        for connection in self._connections:
            self._send(connection, settings)

    def encode(self, units: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
        """Each unit with what is written of it, in their order."""
        given: dict[int, Any] = {}
        done: dict[int, Any] = {}
        held = dict.fromkeys(self._connections, 0)
        window = _WINDOW * len(held)
        sent = taken = 0
        more = True
        while True:
            while more and sent - taken < window:
                idle = min(held, key=held.__getitem__)
                if held[idle] >= _AHEAD:
                    break
                if (unit := next(units, None)) is None:
                    more = False
                    break
                self._send(idle, (sent, unit))
                held[idle] += 1
                given[sent] = unit._replace(data=b"") if hasattr(unit, "data") else unit
                sent += 1
            if taken in done:
                yield given.pop(taken), done.pop(taken)
                taken += 1
                continue
            if taken == sent:
                return
            for connection in wait([one for one, count in held.items() if count]):
                assert isinstance(connection, Connection)
                number, answer = self._receive(connection)
                held[connection] -= 1
                if isinstance(answer, Failure):
                    raise RuntimeError(f"a worker failed of {_place(given[number])}: {answer}")
                if isinstance(answer, Exception):
                    raise answer
                done[number] = answer

    def close(self) -> None:
        """End all workers."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.wait()
        self._connections, self._processes = [], []

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            code = _START.format(path=sys.path, descriptor=theirs.fileno())
            self._processes.append(
                subprocess.Popen(
                    ["env", *_ONE_THREAD, sys.executable, "-c", code],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    process_group=0,  # Ctrl-C is for the one who waits for them
                )
            )
            self._connections.append(Connection(ours.detach()))

    def _send(self, connection: Connection, message: Any) -> None:
        try:
            connection.send(message)
        except (BrokenPipeError, ConnectionResetError):
            raise RuntimeError(self._death(connection)) from None

    def _receive(self, connection: Connection) -> Any:
        try:
            return connection.recv()
        except (EOFError, ConnectionResetError):
            raise RuntimeError(self._death(connection)) from None

    def _death(self, connection: Connection) -> str:
        process = self._processes[self._connections.index(connection)]
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        return (
            f"a worker ended with status {process.returncode} (-9 is most often memory: use fewer "
            f"workers or a smaller max_bytes); what was written is kept, and goes on when called "
            f"again"
        )


def _place(unit: Any) -> str:
    return unit.path if hasattr(unit, "path") else unit.paths[0]
