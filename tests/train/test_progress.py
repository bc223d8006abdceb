"""The progress line: in place on a terminal, sparse elsewhere, silent on other ranks."""

import io

import pytest

from megablocks_core.groups import Mesh
from megablocks_core.testing import ranks
from megablocks_core.train import Mean, Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_sees_one_line_rewritten():
    stream = Terminal()
    progress = Progress(2, stream=stream)
    progress.update(0, {"loss": Mean(9.0, 2), "tokens_per_second": Mean(18_300.0, 1)})
    progress.update(1, {"loss": 2.25})
    progress.close()
    first, second = stream.getvalue().rstrip("\n").split("\r")[1:]
    assert first.split("  ") == [
        "step 1/2",
        "############------------",
        "loss 4.5000",
        "18.3k tokens/s",
        "0:00 left",
    ]
    assert second.startswith("step 2/2") and "loss 2.2500" in second and "in 0:00" in second
    assert len(second) >= len(first)  # the shorter line covers the longer
    assert stream.getvalue().endswith("\n")


def test_a_file_sees_few_plain_lines_and_always_the_last():
    stream = io.StringIO()
    progress = Progress(1000, every=3600.0, stream=stream)
    for step in range(1000):
        progress.update(step, {"loss": 1.0})
    progress.close()
    lines = stream.getvalue().splitlines()
    assert [line[:14] for line in lines] == ["step    1/1000", "step 1000/1000"]
    assert "\r" not in stream.getvalue()


def test_the_speed_is_that_of_all_steps_since_the_line_before():
    stream = io.StringIO()
    progress = Progress(3, every=3600.0, stream=stream)
    for step, seconds in enumerate((1.0, 1.0, 3.0)):
        progress.update(step, {"tokens_per_second": Mean(1000.0, seconds)})
    assert "500 tokens/s" in stream.getvalue().splitlines()[-1]


def test_a_resumed_run_reckons_from_where_it_started():
    stream = Terminal()
    progress = Progress(200, start=100, stream=stream)
    progress._began -= 10.0
    progress.update(109, {})
    assert "1:30 left" in stream.getvalue()


def test_no_step_is_no_run():
    with pytest.raises(ValueError, match="total=0"):
        Progress(0)


@ranks(2)
def test_only_rank_0_writes():
    stream, group = io.StringIO(), Mesh().group("dp")
    Progress(1, stream=stream, group=group).update(0, {})
    assert bool(stream.getvalue()) == (group.rank == 0)
