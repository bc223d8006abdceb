"""Collect garbage at chosen steps, so that ranks pause together and not one after another."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def collect_every(steps: int) -> Iterator[Callable[[], None]]:
    """Collect garbage on every ``steps``-th call of what the block is given, and never between.

        with collect_every(100) as collect:
            for step in range(first, last):
                ...
                collect()

    A pause that Python takes on its own delays every rank that waits for this one, and comes
    on each at another step. Ranks that call alike collect alike; nothing is sent. What exists
    when the block is entered, such as modules, is set aside, so that no collection looks at
    it again. On leaving, collection is on or off as it was, and what was set aside is looked at
    again, unless something had been set aside before.

    Raises:
        ValueError: ``steps`` is below 1 or not whole.
    """
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps={steps} must be a whole number of at least 1")
    was_on, had_frozen = gc.isenabled(), gc.get_freeze_count()
    calls = 0

    def collect() -> None:
        nonlocal calls
        calls += 1
        if calls % steps == 0:
            gc.collect()

    gc.disable()
    gc.collect()
    gc.freeze()
    try:
        yield collect
    finally:
        if not had_frozen:
            gc.unfreeze()
        if was_on:
            gc.enable()
