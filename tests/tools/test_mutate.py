"""The tool tells faults that the suite finds from those that survive it."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "mutate.py"
COPY_TO = "test_copy_to_sums_the_gradients_of_work_on_own_features"


def _mutate(*arguments):
    return subprocess.run([sys.executable, TOOL, *arguments], capture_output=True, text=True)


@pytest.mark.slow
def test_a_fault_that_a_test_finds_is_named_with_the_test():
    run = _mutate("copy_to: backward dropped", "--", "tests/groups/test_collectives.py")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "found     copy_to: backward dropped" in run.stdout
    assert COPY_TO in run.stdout


@pytest.mark.slow
def test_a_survivor_makes_the_run_fail():
    run = _mutate("expert forgotten", "--", "tests/groups/test_collectives.py", "-k", COPY_TO)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "SURVIVES  mark: expert forgotten" in run.stdout
    assert "unexplained" in run.stdout


@pytest.mark.slow
def test_pytest_going_wrong_is_no_verdict():
    run = _mutate("expert forgotten", "--", "no_such_folder")
    assert "no_such_folder" in run.stderr
    assert "SURVIVES" not in run.stdout
