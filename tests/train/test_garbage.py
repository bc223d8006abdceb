"""Garbage is collected at chosen steps and at no other; afterwards all is as it was."""

import gc
import subprocess
import sys
import weakref

import pytest

from megablocks_core.train import collect_every


class Cycle:
    def __init__(self):
        self.itself = self


def test_only_every_nth_call_collects():
    with collect_every(3) as collect:
        alive = []
        gone_after = weakref.ref(Cycle())
        for _ in range(7):
            collect()
            alive.append(gone_after() is not None)
    assert alive == [True, True, False, False, False, False, False]


def test_nothing_is_collected_between():
    with collect_every(1000) as collect:
        before = gc.get_stats()[0]["collections"]
        for _ in range(200):
            collect()
            [Cycle() for _ in range(100)]  # far more than Python's own threshold
        assert gc.get_stats()[0]["collections"] == before
        assert not gc.isenabled()
    assert gc.isenabled()


def test_what_was_there_is_set_aside_and_given_back_also_after_an_error():
    """In a process of its own, because what others have set aside stays aside."""
    code = """
import gc
from megablocks_core.train import collect_every
for outer in (False, True):
    (gc.disable if outer else gc.enable)()
    if outer:
        gc.freeze()
    try:
        with collect_every(1):
            assert gc.get_freeze_count() > 1000 and not gc.isenabled()
            raise KeyError
    except KeyError:
        pass
    assert gc.isenabled() != outer
    assert (gc.get_freeze_count() > 0) == outer
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("steps", [0, 1.5, float("nan")])
def test_steps_must_be_whole_and_positive(steps):
    words = f"steps={steps} must be a whole number of at least 1"
    with pytest.raises(ValueError, match=words), collect_every(steps):
        pass
