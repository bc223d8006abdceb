"""What is said of the machine agrees with what torch and a second look say."""

import os

import pytest
import torch

from megablocks_core.groups import Mesh
from megablocks_core.testing import ranks
from megablocks_core.train import matmul_peak
from megablocks_core.train.machine import (
    cpu_seconds,
    hardware,
    network_bytes,
    peak_memory_bytes,
    usable_cores,
)


def test_hardware():
    found = hardware()
    assert found["cpu"] and usable_cores() == os.sched_getaffinity(0)
    assert found["cores"] == len(usable_cores())
    assert found["memory_bytes"] > 1e9
    assert len(found["accelerators"]) == torch.cuda.device_count()


def test_peak_memory_grows_with_what_is_held():
    before = peak_memory_bytes()
    held = torch.ones(before // 4 + 2**24)  # four times as many bytes
    assert peak_memory_bytes() > before + 2**25 and held[0] == 1


def test_processor_time_passes():
    before = cpu_seconds()
    while cpu_seconds() < before + 0.05:
        pass


@ranks(2)
def test_what_ranks_send_is_counted():
    group = Mesh().group("dp")
    before = network_bytes()
    assert before is not None
    for _ in range(4):
        group.all_reduce(torch.ones(2**20))
    after = network_bytes()
    assert after is not None and after - before > 2**23


@ranks(1, 2)
def test_the_peak_is_the_sum_of_ranks_that_measure_together():
    group = Mesh().group("dp")
    together = matmul_peak(size=128, seconds=0.05, group=group)
    assert all(peak == together for peak in group.all_gather_object(together))
    alone = matmul_peak(size=128, seconds=0.05)
    assert together > 0.3 * alone


def test_the_peak_is_that_of_products_actually_done(monkeypatch):
    """With a clock that makes each product take 1 s, n**3 products and sums give 2 n**3 FLOP/s."""
    ticks = iter(range(1000))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    assert matmul_peak(size=8, seconds=5.0) == pytest.approx(2 * 8**3)
