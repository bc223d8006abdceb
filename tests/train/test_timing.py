"""Seconds go to the innermost phase, and figures of ranks and lines add up."""

import time

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

from megablocks_core.groups import Mesh
from megablocks_core.testing import ranks
from megablocks_core.train import StepTimer, pooled


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
            return 0.25

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
    assert traffic.get_total_counts() <= 2
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
def test_one_rank_speaks_for_its_machine():
    group = Mesh().group("dp")
    assert StepTimer(group=group)._speaks_for_host == (group.rank == 0)


def test_wrong_phases_are_refused():
    with pytest.raises(ValueError, match="different names"):
        StepTimer(phases=("data", "checkpoint"))
    timer = StepTimer(phases=("data", "schedule"))
    with pytest.raises(ValueError, match="phase='forward' must be one of"), timer("forward"):
        pass
