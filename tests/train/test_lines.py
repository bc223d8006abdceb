"""Lines of metrics are whole after a crash and counted once after a resume."""

import json
import math
import resource
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.groups import Mesh
from megablocks_core.testing import ranks
from megablocks_core.train import JsonLines, Mean, Metrics, pooled, read_lines


def losses_of(path):
    return [
        (line.step, line.values["loss"].sum, line.values["loss"].count) for line in read_lines(path)
    ]


def test_a_line_holds_step_clock_sums_and_counts(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    before = time.time()
    lines = JsonLines(path)
    lines.write(3, {"loss": Mean(9.0, 4), "learning_rate": 1e-3})
    lines.close()
    row = json.loads(path.read_text())
    assert before <= row.pop("time") <= time.time()
    assert row == {"step": 3, "loss": [9.0, 4.0], "learning_rate": [1e-3, 1.0]}
    (line,) = read_lines(path)
    assert line.step == 3 and line.values == {"loss": 2.25, "learning_rate": 1e-3}


def test_numbers_come_back_bit_for_bit(tmp_path):
    lines = JsonLines(tmp_path / "m.jsonl")
    lines.write(0, {"loss": Mean(0.1 + 0.2, 3), "low": Mean(-5e-324, 1)})
    values = read_lines(lines.path)[0].values
    assert (values["loss"].sum, values["low"].sum) == (0.1 + 0.2, -5e-324)


def test_what_is_not_finite_is_still_json(tmp_path):
    lines = JsonLines(tmp_path / "m.jsonl")
    lines.write(0, {"loss": Mean(math.inf, 2), "grad_norm": math.nan})
    assert json.loads(lines.path.read_text())["loss"] == [None, 2.0]
    values = read_lines(lines.path)[0].values
    assert math.isnan(values["loss"]) and values["loss"].count == 2
    assert math.isnan(values["grad_norm"])


@given(
    stops=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 12)), max_size=4),
    interval=st.integers(1, 5),
)
def test_resumes_and_logging_intervals_never_change_the_total(tmp_path_factory, stops, interval):
    """Steps are run, killed after a later step, and run again from an earlier checkpoint."""
    path = tmp_path_factory.mktemp("run") / "m.jsonl"
    metrics, lines = Metrics("loss"), JsonLines(path)
    step, saved = 0, (0, metrics.state_dict())

    def run_to(end):
        nonlocal step, saved
        while step < end:
            metrics.add("loss", 2.0**step, step + 1)
            step += 1
            if step % interval == 0:
                lines.write(step - 1, metrics.reduce())
            if step % 3 == 0:
                saved = (step, metrics.state_dict())

    for _, end in stops:
        run_to(end)
        lines.close()
        step, state = saved
        metrics = Metrics("loss")
        metrics.load_state_dict(state)
        lines = JsonLines(path, step=step)
    run_to(20)
    total = pooled(
        [line.values["loss"] for line in read_lines(path)] + list(metrics.reduce().values())
    )
    assert (total.sum, total.count) == (2.0**20 - 1, 20 * 21 / 2)


def test_a_resume_drops_the_steps_that_run_again(tmp_path):
    """The first loss after a resume is not counted twice (NVIDIA/Megatron-LM#6237)."""
    path = tmp_path / "m.jsonl"
    lines = JsonLines(path)
    for step in range(6):
        lines.write(step, {"loss": Mean(step, 1)})
    lines.close()
    resumed = JsonLines(path, step=4)
    assert resumed.last_seen == pytest.approx(time.time(), abs=60)
    resumed.write(4, {"loss": Mean(40.0, 1)})
    assert losses_of(path) == [(0, 0, 1), (1, 1, 1), (2, 2, 1), (3, 3, 1), (4, 40, 1)]


def test_steps_must_rise(tmp_path):
    lines = JsonLines(tmp_path / "m.jsonl", step=5)
    with pytest.raises(ValueError, match="step=4 must be above 4"):
        lines.write(4, {})
    lines.write(5, {})
    with pytest.raises(ValueError, match="step=5 must be above 5"):
        lines.write(5, {})


@pytest.mark.parametrize("cut", range(1, 40, 6))
def test_a_line_cut_short_at_the_end_is_dropped(tmp_path, cut):
    path = tmp_path / "m.jsonl"
    lines = JsonLines(path)
    lines.write(0, {"loss": Mean(1.0, 1)})
    lines.write(1, {"loss": Mean(2.0, 1)})
    lines.close()
    path.write_bytes(path.read_bytes()[:-cut])
    assert losses_of(path) == [(0, 1, 1)]
    JsonLines(path, step=1).write(1, {"loss": Mean(3.0, 1)})
    assert losses_of(path) == [(0, 1, 1), (1, 3, 1)]


@pytest.mark.parametrize("bad", ["{", "3", '{"step": 1}', '{"step": 1, "time": 0, "loss": 3}'])
def test_a_broken_line_in_the_middle_is_named_and_nothing_is_lost(tmp_path, bad):
    path = tmp_path / "m.jsonl"
    text = f'{{"step": 0, "time": 0}}\n{bad}\n{{"step": 2, "time": 0}}\n'
    path.write_text(text)
    for use in (read_lines, JsonLines):
        with pytest.raises(ValueError, match="m.jsonl, line 2"):
            use(path)
    assert path.read_text() == text


def test_a_killed_writer_leaves_whole_lines_to_read_and_go_on_from(tmp_path):
    path = tmp_path / "m.jsonl"
    code = """
import sys
from megablocks_core.train import JsonLines, Mean
lines = JsonLines(sys.argv[1])
for step in range(10**9):
    lines.write(step, {"loss": Mean(step, 1), "name " + "x" * 2000: Mean(1.0)})
"""
    writer = subprocess.Popen([sys.executable, "-c", code, str(path)])
    deadline = time.monotonic() + 60
    while not (path.exists() and path.stat().st_size > 200_000):
        assert writer.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    writer.send_signal(signal.SIGKILL)
    assert writer.wait() == -signal.SIGKILL
    # The kernel may stop a write between two pages of memory: a line that was cut is not read.
    num_whole = path.read_bytes().count(b"\n")
    steps = [line.step for line in read_lines(path)]
    assert steps == list(range(num_whole)) and num_whole > 50
    JsonLines(path, step=num_whole).write(num_whole, {"loss": Mean(1.0, 1)})
    assert len(read_lines(path)) == num_whole + 1


def test_a_full_disk_raises_and_leaves_whole_lines(tmp_path):
    """The limit on a file's size stands in for a full disk: a write that comes back short."""
    path = tmp_path / "m.jsonl"
    lines = JsonLines(path)
    lines.write(0, {"loss": Mean(1.0, 1)})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, before[1]))
    try:
        with pytest.raises(OSError, match="10 of .* bytes written"):
            lines.write(1, {"loss": Mean(2.0, 1)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes().endswith(b"\n")
    lines.write(2, {"loss": Mean(3.0, 1)})
    assert losses_of(path) == [(0, 1, 1), (2, 3, 1)]


@ranks(2)
def test_only_rank_0_writes(tmp_path):
    group = Mesh().group("dp")
    lines = JsonLines(tmp_path / "m.jsonl", group=group)
    lines.write(0, {"loss": Mean(1.0 + group.rank, 1)})
    group.barrier()
    assert losses_of(tmp_path / "m.jsonl") == [(0, 1, 1)]
    with pytest.raises(ValueError, match="must be above 0"):
        lines.write(0, {})


@pytest.mark.parametrize("name", ["step", "time"])
def test_what_a_line_has_of_its_own_is_no_metric(name, tmp_path):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match=name):
        lines.write(0, {name: 3.0})
    lines.close()
