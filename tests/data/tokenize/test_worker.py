"""A worker answers, and is gone as soon as nobody listens."""

import socket
import subprocess
import sys
from multiprocessing.connection import Connection

from megablocks_core.data.tokenize.encoding import Settings, UnitEncoder
from megablocks_core.data.tokenize.inputs import find_inputs
from megablocks_core.data.tokenize.units import plan
from megablocks_core.data.tokenize.worker import Failure

from .conftest import json_lines, some_texts

SETTINGS = Settings("bytes", "bytes", "hf", 256, "uint16", "text", 10**6)


def started():
    ours, theirs = socket.socketpair()
    number = theirs.fileno()
    code = f"from megablocks_core.data.tokenize.worker import serve; serve({number})"
    process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[number])
    theirs.close()
    return process, Connection(ours.detach())


def test_a_worker(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines(some_texts(30)))
    units = list(plan(find_inputs([tmp_path]), key="text", unit_bytes=300, max_bytes=10**6))
    process, connection = started()
    connection.send(SETTINGS)
    for number, unit in enumerate(units):  # all at once: it reads while it works
        connection.send((number, unit))
    here = UnitEncoder(SETTINGS)
    for number, unit in enumerate(units):
        found, encoded = connection.recv()
        assert found == number
        assert encoded.ids.tolist() == here.encode(unit).ids.tolist()
    (tmp_path / "a.jsonl").unlink()
    connection.send((7, units[0]))
    assert isinstance(connection.recv()[1], FileNotFoundError)
    connection.send((8, None))
    assert isinstance(connection.recv()[1], Failure)
    connection.close()
    assert process.wait(20) == 1
