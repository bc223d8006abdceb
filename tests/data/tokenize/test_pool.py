"""Units come back in order from any number of workers, and no worker is left behind."""

import os
import signal
import time

import pytest

from megablocks_core.data.tokenize.encoding import Settings
from megablocks_core.data.tokenize.inputs import find_inputs
from megablocks_core.data.tokenize.pool import OwnProcess, Pool
from megablocks_core.data.tokenize.units import plan

from .conftest import json_lines, some_texts

SETTINGS = Settings("bytes", "bytes", "hf", None, "uint16", "text", 10**6)


@pytest.fixture
def units(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines(some_texts(200)))
    return list(plan(find_inputs([tmp_path]), key="text", unit_bytes=300, max_bytes=10**6))


def is_running(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{process}/stat") as file:
        return file.read().split()[2] != "Z"


def test_order_and_content_are_those_of_one_process(units):
    expected = [(unit, one.ids.tolist()) for unit, one in OwnProcess(SETTINGS).encode(iter(units))]
    assert [unit for unit, _ in expected] == units
    for workers in (1, 3):
        with Pool(SETTINGS, workers) as pool:
            for _ in range(2):
                found = [(unit, one.ids.tolist()) for unit, one in pool.encode(iter(units))]
                assert found == expected
            processes = [process.pid for process in pool._processes]
        assert not any(map(is_running, processes))


def test_units_under_way_are_bounded(units):
    asked = []

    def counted():
        for unit in units:
            asked.append(unit)
            yield unit

    with Pool(SETTINGS, 1) as pool:
        for taken, _ in enumerate(pool.encode(counted())):
            assert len(asked) - taken <= 5


def test_a_dead_worker_is_named_and_the_others_end(units):
    with Pool(SETTINGS, 2) as pool:
        answers = pool.encode(iter(units))
        next(answers)
        processes = [process.pid for process in pool._processes]
        os.kill(processes[0], signal.SIGKILL)
        with pytest.raises(RuntimeError, match="a worker ended with status -9"):
            list(answers)
    assert not any(map(is_running, processes))


def test_a_file_that_is_gone_is_an_error_of_the_system(units, tmp_path):
    (tmp_path / "a.jsonl").unlink()
    with Pool(SETTINGS, 1) as pool, pytest.raises(FileNotFoundError, match=r"a\.jsonl"):
        list(pool.encode(iter(units)))


def test_a_fault_of_our_own_comes_with_its_place(units):
    settings = SETTINGS._replace(dtype="no such dtype")
    with Pool(settings, 1) as pool, pytest.raises(RuntimeError, match="worker ended with status 1"):
        list(pool.encode(iter(units)))
    with Pool(SETTINGS, 1) as pool, pytest.raises(RuntimeError, match=r"failed of .*a\.jsonl"):
        list(pool.encode(iter([units[0]._replace(start="0")])))


def test_workers_end_with_a_killed_parent(units, tmp_path):
    child = os.fork()
    if not child:
        pool = Pool(SETTINGS, 2)
        (tmp_path / "pids").write_text(" ".join(str(one.pid) for one in pool._processes))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    processes = [int(number) for number in (tmp_path / "pids").read_text().split()]
    deadline = time.monotonic() + 20
    while any(map(is_running, processes)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
