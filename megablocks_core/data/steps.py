"""Where each optimizer step begins, when the batch size changes on the way."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from megablocks_core.data.checks import pairs, whole_number

END = 2**63  # after any sample

Stages = int | Sequence[tuple[int, int]]


class _Row(NamedTuple):
    step: int
    sample: int
    size: int


class StepPlan:
    """Steps that begin at sample 0 and take as many samples as ``sizes`` says at their first.

    ``sizes`` is one number, or pairs (sample, size) in increasing order, the first at sample 0:
    from that sample on. A step that begins before a change keeps its size and may end after it.
    The plan goes through ``sample``, where a run resumes: a step that would reach past it ends
    there, so that it holds for any resume, also after another plan.

    All is arithmetic over a table with a row for each change.
    """

    def __init__(self, sizes: Stages, *, sample: int = 0) -> None:
        self._rows: list[_Row] = []
        stages = as_stages(sizes)
        ends = [start for start, _ in stages[1:]] + [END]
        step, now = 0, 0
        for (_, size), end in zip(stages, ends, strict=True):
            while now < end:
                stop = now + -(-(end - now) // size) * size
                if now < sample < stop:
                    stop = sample
                self._rows.append(_Row(step, now, size))
                step, now = step - (now - stop) // size, stop

    def start(self, step: int) -> int:
        """Return the first sample of a step, which is where the one before ends."""
        place = bisect_right(self._rows, step, key=lambda row: row.step) - 1
        row = self._rows[place]
        start = row.sample + (step - row.step) * row.size
        later = self._rows[place + 1 : place + 2]
        return min(start, later[0].sample) if later else start

    def step_at(self, sample: int) -> int:
        """Return the first step that begins at a sample or after it."""
        place = bisect_right(self._rows, sample, key=lambda row: row.sample) - 1
        row = self._rows[place]
        return row.step - (row.sample - sample) // row.size

    def num_steps(self, num_samples: int, *, drop_last: bool) -> int:
        """Return how many steps there are in so many samples, with or without a cut last one."""
        step = self.step_at(num_samples)
        return step - 1 if drop_last and self.start(step) > num_samples else step


def as_stages(sizes: Stages, name: str = "global_batch_size") -> list[tuple[int, int]]:
    """Return a schedule as pairs (from this sample on, this value)."""
    if getattr(sizes, "ndim", None) == 0 or not isinstance(sizes, Iterable):
        return [(0, whole_number(name, sizes, 1))]
    rule = "a whole number, or pairs (from this sample on, number)"
    stages = [
        (whole_number(f"{name}: sample", start), whole_number(name, size, 1))
        for start, size in pairs(name, sizes, rule)
    ]
    starts = [start for start, _ in stages]
    if starts[:1] != [0] or any(a >= b for a, b in pairwise(starts)):
        raise ValueError(f"{name}={sizes} must begin at sample 0 and go on in increasing order")
    return stages


def value_at(stages: Sequence[tuple[int, int]], sample: int) -> int:
    """Return what a schedule says at a sample."""
    return stages[bisect_right(stages, sample, key=lambda stage: stage[0]) - 1][1]


class Skips:
    """Ranges of steps that are left out.

    Raises:
        ValueError: a range (first, after the last) that is empty or negative.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        rule = "ranges of steps (first, after the last)"
        given = [
            (whole_number("skip: first", first), whole_number("skip: after the last", after))
            for first, after in pairs("skip", ranges, rule)
        ]
        if not all(0 <= first < after for first, after in given):
            raise ValueError(f"skip={given} must hold {rule}")
        self._ranges: list[tuple[int, int]] = []
        for first, after in sorted(given):
            if self._ranges and first <= self._ranges[-1][1]:
                first, last = self._ranges.pop()
                after = max(after, last)
            self._ranges.append((first, after))

    def nth(self, step: int, count: int = 0) -> int:
        """Return the step that is left ``count`` steps after the first that is left from here."""
        for first, after in self._ranges:
            if after > step and first <= step + count:
                count += after - max(first, step)
        return step + count

    def left(self, first: int, last: int) -> int:
        """Return how many steps of a range are left."""
        gone = (min(b, last) - max(a, first) for a, b in self._ranges)
        return max(0, last - first) - sum(max(0, number) for number in gone)
