"""Every test, here and on worker ranks: one thread, new memory full of NaN, fixed examples."""

import gc
import signal
import socket

import hypothesis
import pytest

from megablocks_core.testing.worker import forget_compiled, prepare
from tests.forks import ForkServer

hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, database=None)


def pytest_addoption(parser):
    group = parser.getgroup("ranks")
    group.addoption("--delayed", action="store_true", help="messages between ranks come late")
    group.addoption("--mutation", help="a fault in groups, on all ranks: some test must fail")


def pytest_configure(config):
    # What a shell starts in the background ignores interrupts, and so does what that starts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    prepare()
    hypothesis.settings.load_profile("suite")


def pytest_collection_modifyitems(config, items):
    """Late messages and faults concern tests in which ranks send: run no others."""
    if config.getoption("--delayed") or config.getoption("--mutation"):
        config.hook.pytest_deselected(items=[item for item in items if _num_ranks(item) < 2])
        items[:] = [item for item in items if _num_ranks(item) > 1]


def pytest_collection_finish(session):
    """Set aside what was loaded: tests that collect garbage look through it no more."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config):
    gc.unfreeze()  # extensions complain of what still lives when Python ends


def pytest_runtest_setup(item):
    forget_compiled()


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    server = ForkServer(folder, "transformers.models.llama.modeling_llama")
    yield server
    server.close()


@pytest.fixture
def launch(fork_server):
    """Starts ``python *words`` on ``ranks`` ranks; what still runs after the test is killed."""
    started = []

    def start(*words, ranks=1, cwd=None):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        world = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        processes = []
        for rank in range(ranks):
            place = {"RANK": rank, **world} if ranks > 1 else {}
            environment = {name: str(value) for name, value in place.items()}
            processes.append(fork_server.start(*words, cwd=cwd, environment=environment))
            started.append(processes[-1])
        return processes

    yield start
    for process in started:
        process.kill()
    for process in started:
        process.wait()


def _num_ranks(item):
    return item.callspec.params.get("num_ranks", 1) if hasattr(item, "callspec") else 1
