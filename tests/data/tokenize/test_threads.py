"""Units come back in order from any number of threads, of which none is left behind."""

import threading
import time

import pytest

from megablocks_core.data.tokenize.encoders import open_encoder
from megablocks_core.data.tokenize.encoding import Settings
from megablocks_core.data.tokenize.inputs import find_inputs
from megablocks_core.data.tokenize.pool import OwnProcess
from megablocks_core.data.tokenize.threads import Threads
from megablocks_core.data.tokenize.units import Held, plan

from .conftest import json_lines, some_texts


@pytest.fixture
def units(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines(some_texts(200)))
    return list(plan(find_inputs([tmp_path]), key="text", unit_bytes=300, max_bytes=10**6))


@pytest.mark.parametrize("workers", [1, 3])
def test_order_and_content_are_those_of_one_thread(units, bpe, workers):
    spec = f"hf:{bpe}"
    name, size = open_encoder(spec).name, open_encoder(spec).vocab_size
    settings = Settings(spec, name, "gigatoken", 0, "uint16", "text", 10**6, size)
    expected = [one.ids.tolist() for _, one in OwnProcess(settings).encode(iter(units))]
    before = threading.active_count()
    threads = Threads(settings._replace(threads=True), workers)
    for _ in range(2):
        found = list(threads.encode(iter(units)))
        assert [unit for unit, _ in found] == units
        assert [one.ids.tolist() for _, one in found] == expected
    assert threading.active_count() == before + workers
    threads.close()
    assert threading.active_count() == before


class Slow:
    """Opens what answers a unit by itself, the even ones late; it notes what is going on."""

    def __init__(self):
        self.opened, self.under_way, self.most = [], 0, 0
        self.lock = threading.Lock()

    def open(self):
        self.opened.append(threading.get_ident())
        return self

    def encode(self, unit):
        with self.lock:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        time.sleep(0.02 if unit % 2 == 0 else 0)
        if unit == 7:
            raise FileNotFoundError("a.jsonl")
        with self.lock:
            self.under_way -= 1
        return unit


def test_threads_run_side_by_side_with_an_encoder_each():
    slow = Slow()
    threads = Threads(slow, 2)
    assert list(threads.encode(iter(range(0, 6)))) == [(unit, unit) for unit in range(6)]
    assert slow.most == 2
    assert len(slow.opened) == len(set(slow.opened)) == 2
    threads.close()


def test_units_under_way_are_bounded():
    asked = []

    def counted():
        for unit in range(0, 6):
            asked.append(unit)
            yield unit

    threads = Threads(Slow(), 1)
    for taken, _ in enumerate(threads.encode(counted())):
        assert len(asked) - taken <= 4
    threads.close()


def test_an_error_comes_in_its_place_and_what_waits_is_not_begun():
    slow = Slow()
    threads = Threads(slow, 1)
    answers = threads.encode(iter(range(5, 100)))
    assert [next(answers), next(answers)] == [(5, 5), (6, 6)]
    with pytest.raises(FileNotFoundError, match=r"a\.jsonl"):
        next(answers)
    threads.close()


def test_lines_that_were_decompressed_are_not_kept():
    class Reads:
        def open(self):
            return self

        def encode(self, unit):
            return len(unit.data)

    threads = Threads(Reads(), 1)
    held = Held((0,), "x", True, b"abc", b"", "", 3)
    assert list(threads.encode(iter([held]))) == [(held._replace(data=b""), 3)]
    threads.close()
