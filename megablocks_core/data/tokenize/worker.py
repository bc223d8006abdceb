"""A process that encodes the units it is sent, until the one that sends them is gone.

It is started with the number of a socket, and is sent settings, which open an encoder, and then
numbered units.
"""

from __future__ import annotations

import os
import traceback
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol


class Encodes(Protocol):
    """Encodes units, each by itself."""

    def encode(self, unit: Any, /) -> Any:
        """What is written of a unit."""
        ...


class Opens(Protocol):
    """Settings, which travel to a worker."""

    def open(self) -> Encodes:
        """What encodes by them."""
        ...


class Failure(Exception):
    """What a worker failed of, where it is no fault of the input."""


def serve(descriptor: int) -> None:
    """Answer each unit with its number and what was encoded, or why it could not be."""
    connection = Connection(descriptor)
    waiting: SimpleQueue[Any] = SimpleQueue()
    # Read ahead, so that whoever sends never waits, and end at once when no one listens.
    Thread(target=_receive, args=(connection, waiting), daemon=True).start()
    encoder = waiting.get().open()
    while True:
        number, unit = waiting.get()
        try:
            answer = encoder.encode(unit)
        except Exception as error:
            traceback_text = "".join(traceback.format_exception(error))
            answer = error if isinstance(error, OSError) else Failure(traceback_text)
        connection.send((number, answer))


def _receive(connection: Connection, waiting: SimpleQueue[Any]) -> None:
    try:
        while True:
            waiting.put(connection.recv())
    except (EOFError, OSError):
        os._exit(1)
