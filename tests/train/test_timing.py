"""Seconds go to the innermost phase, and figures of ranks and lines add up."""

import time
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

from megablocks_core.groups import Mesh
from megablocks_core.testing import ranks
from megablocks_core.train import StepTimer, pooled, timing
from megablocks_core.train.communication import Seen


class Clock:
    """Stands still until ``now`` is moved."""

    now = 0.0

    def __call__(self):
        return self.now


class FakeSample:
    def __init__(self, seen):
        self.seen = seen

    def start(self):
        pass

    def stop(self):
        return self.seen


def test_each_second_belongs_to_the_innermost_phase():
    timer = StepTimer()
    with timer("backward"):
        time.sleep(0.05)
        with timer("reduction"):
            time.sleep(0.1)
    timer.step(tokens=10)
    figures = timer.reduce()
    assert figures["backward_seconds"] == pytest.approx(0.05, abs=0.03)
    assert figures["reduction_seconds"] == pytest.approx(0.1, abs=0.03)
    inside = figures["backward_seconds"] + figures["reduction_seconds"]
    assert inside <= figures["step_seconds"] <= inside + 0.03
    assert "optimizer_seconds" not in figures  # never entered


def test_checkpoints_and_evaluation_lie_between_steps():
    timer = StepTimer()
    for _ in range(2):
        with timer("forward"):
            time.sleep(0.02)
        timer.step(tokens=10)
        with timer("evaluation"):
            time.sleep(0.1)
    with timer("checkpoint"):
        time.sleep(0.1)
    figures = timer.reduce()
    assert figures["step_seconds"].count == 2
    assert 0.02 <= figures["step_seconds"] < 0.06
    assert figures["evaluation_seconds"].count == 2
    assert figures["evaluation_seconds"] == pytest.approx(0.1, abs=0.03)
    assert figures["checkpoint_seconds"].count == 1


def test_lines_add_up_to_the_whole():
    timer = StepTimer()
    began = time.perf_counter()
    lines = []
    for tokens in (100, 300):
        with timer("data"):
            time.sleep(0.01)
        timer.step(tokens=tokens, read_bytes=2 * tokens)
        lines.append(timer.reduce())
    elapsed = time.perf_counter() - began
    speed = pooled(line["tokens_per_second"] for line in lines)
    assert speed.sum == 400 and 0.02 <= speed.count <= elapsed
    assert pooled(line["read_bytes_per_second"] for line in lines).sum == 800
    share = pooled(line["data_wait_share"] for line in lines)
    assert 0 < share <= 1 and share.count == speed.count
    assert timer.reduce().keys() <= {"peak_memory_bytes", "utilisation", "network_bytes_per_second"}


def test_a_phase_ends_also_when_its_body_raises():
    timer = StepTimer()
    with pytest.raises(RuntimeError), timer("data"):
        raise RuntimeError
    timer.step(tokens=1)
    assert timer.reduce()["data_seconds"] > 0


def test_an_error_in_a_sampled_step_leaves_no_profiler_on():
    timer = StepTimer(sample_every=1)
    for _ in range(2):
        timer.step(tokens=1)
    with pytest.raises(KeyboardInterrupt), timer("forward"):
        assert torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]
        raise KeyboardInterrupt
    assert not torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]


def test_the_machine_is_looked_at():
    timer = StepTimer()
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    timer.step(tokens=1)
    figures = timer.reduce()
    assert figures["utilisation"].sum >= 0.1
    assert 0 < figures["utilisation"] <= 1.05
    assert figures["peak_memory_bytes"] > 50e6


@pytest.mark.parametrize(("every", "sampled"), [(0, 0), (1, 4), (2, 2), (3, 2), (10, 1)])
def test_sampled_steps(every, sampled, monkeypatch):
    count = 0

    class Sample:
        def start(self):
            nonlocal count
            count += 1

        def stop(self):
            return Seen(0.25, None)

    monkeypatch.setattr("megablocks_core.train.timing.CommunicationSample", Sample)
    timer = StepTimer(sample_every=every)
    for _ in range(5):
        with timer("forward"), timer("backward"):
            pass
        timer.step(tokens=1)
    assert count == sampled
    share = timer.reduce().get("communication_wait_share")
    assert (share.sum if share is not None else 0.0) == 0.25 * sampled


@ranks(2)
def test_ranks_are_averaged_summed_or_the_largest_taken():
    group = Mesh().group("dp")
    timer = StepTimer(sample_every=1, group=group)
    for _ in range(2):
        with timer("forward"):
            time.sleep(0.2 * group.rank)
        with timer("reduction"):
            group.all_reduce(torch.ones(2))
        timer.step(tokens=40, own_tokens=10 + 20 * group.rank, read_bytes=5)
    with CommDebugMode() as traffic:
        figures = timer.reduce()
    assert traffic.get_total_counts() == 1
    assert figures["forward_seconds"] == pytest.approx(0.1, abs=0.06)
    assert figures["reduction_seconds"] == pytest.approx(0.1, abs=0.06)
    assert figures["tokens_per_second"].sum == 80
    assert figures["token_balance"] == 1.5
    assert figures["read_bytes_per_second"].sum == 20
    share = figures["communication_wait_share"]
    assert share.count == pytest.approx(0.2, abs=0.1)  # the first step is not sampled
    assert share == pytest.approx(0.5, abs=0.2)
    assert all(other == figures for other in group.all_gather_object(figures))


@ranks(2)
def test_every_figure_of_two_ranks_by_hand():
    """On a clock that stands still unless told: rank 0 takes 4 s a step, rank 1 takes 8 s."""
    group = Mesh().group("dp")
    rank, clock = group.rank, Clock()
    seen = Seen(1.0 + rank, None)
    with (
        patch.object(time, "perf_counter", clock),
        patch.object(timing, "cpu_seconds", lambda: clock.now / 2),
        patch.object(timing, "network_bytes", lambda: int(100 * clock.now)),
        patch.object(timing, "peak_memory_bytes", lambda: 1000 * (1 + rank)),
        patch.object(timing, "CommunicationSample", lambda: FakeSample(seen)),
    ):
        timer = StepTimer(sample_every=1, group=group)
        lines = []
        for step in range(2):
            for phase in ("data", "forward", "backward", "optimizer"):
                with timer(phase):
                    clock.now += 1.0 + rank
            timer.step(tokens=30, own_tokens=10 * (1 + rank), read_bytes=7)
            with timer("checkpoint"):
                clock.now += 6.0 * step
            lines.append(timer.reduce())
    first, second = lines
    cores = timer._host_cores
    assert cores == len(timing.usable_cores())
    assert {key: (mean.sum, mean.count) for key, mean in first.items()} == {
        "step_seconds": (6.0, 1.0),
        "tokens_per_second": (30.0, 6.0),
        "token_balance": (20.0, 15.0),
        "data_wait_share": (1.5, 6.0),
        "utilisation": ((4.0 + 8.0) / 2, 6.0 * cores),
        "peak_memory_bytes": (2000.0, 1.0),
        "network_bytes_per_second": (400.0, 6.0),  # rank 0 speaks for the machine
        "read_bytes_per_second": (14.0, 6.0),
        **{
            f"{phase}_seconds": (1.5, 1.0) for phase in ("data", "forward", "backward", "optimizer")
        },
        "checkpoint_seconds": (0.0, 1.0),
    }
    share = second["communication_wait_share"]
    assert (share.sum, share.count) == (1.5, 6.0)
    assert second["step_seconds"] == 6.0 and second["checkpoint_seconds"] == 6.0
    assert (second["utilisation"].sum, second["utilisation"].count) == (12.0, 12.0 * cores)


def test_an_accelerator_is_used_while_its_kernels_run(monkeypatch):
    monkeypatch.setattr(timing, "CommunicationSample", lambda: FakeSample(Seen(0.0, 3.0)))
    monkeypatch.setattr(time, "perf_counter", clock := Clock())
    timer = StepTimer(sample_every=1)
    for _ in range(3):
        with timer("forward"):
            clock.now += 4.0
        timer.step(tokens=1)
    found = timer.reduce()["utilisation"]
    assert (found.sum, found.count) == (6.0, 8.0)  # the first step is not sampled


@ranks(2)
def test_a_timer_that_is_off_costs_nothing():
    """It asks no clock, makes no object, and sends no message."""
    group = Mesh().group("dp")
    with CommDebugMode() as traffic, patch.object(timing, "time", None):
        timer = StepTimer(sample_every=1, enabled=False, group=group)
        with timer("forward"):
            pass
        assert timer("forward") is timer("data")
        timer.step(tokens=1)
        assert timer.reduce() == {}
    assert traffic.get_total_counts() == 0
    with pytest.raises(ValueError, match="must be one of"):
        timer("forwards")


@ranks(2)
def test_one_rank_speaks_for_its_machine():
    group = Mesh().group("dp")
    with patch.object(timing, "usable_cores", lambda: {group.rank, 7}):
        timer = StepTimer(group=group)
    assert timer._speaks_for_host == (group.rank == 0)
    assert timer._host_cores == 3


def test_wrong_phases_are_refused():
    with pytest.raises(ValueError, match="different names"):
        StepTimer(phases=("data", "checkpoint"))
    timer = StepTimer(phases=("data", "schedule"))
    with pytest.raises(ValueError, match="phase='forward' must be one of"), timer("forward"):
        pass
