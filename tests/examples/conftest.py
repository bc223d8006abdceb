"""Examples as users run them: scripts, alone or on several ranks, and nothing left behind."""

import os
import socket
import subprocess
import sys

import pytest

from tests.examples.tiny import EXAMPLES


@pytest.fixture
def launch():
    """Starts ``python *words`` on ``ranks`` ranks; what still runs after the test is killed."""
    started = []

    def start(*words, ranks=1):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        world = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        processes = []
        for rank in range(ranks):
            place = {"RANK": rank, **world} if ranks > 1 else {}
            environment = {name: str(value) for name, value in place.items()}
            process = subprocess.Popen(
                [sys.executable, *map(str, words)],
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            started.append(process)
            processes.append(process)
        return processes

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def printed(launch):
    """Runs an example to its end on some ranks; what each rank printed."""

    def run(name, *arguments, ranks=1):
        processes = launch(EXAMPLES / name, *arguments, ranks=ranks)
        outputs = [process.communicate(timeout=300) for process in processes]
        for process, (_, errors) in zip(processes, outputs, strict=True):
            assert process.returncode == 0, errors
        return [output for output, _ in outputs]

    return run
