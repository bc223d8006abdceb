"""How benchmarks measure memory: the peak of one step, in a process of its own.

A benchmark's module answers the command line ``SIDE WORD...`` with ``print_peak``, and asks
itself through ``peak_of``.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from benchmarks.timing import Result

_MIB = 1 << 20

Peak = tuple[int, float]


def peak_of(module: str, *words: str | int) -> Peak:
    """MiB and milliseconds that ``module``, called with ``words``, has printed."""
    command = [sys.executable, "-m", module, *map(str, words)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    mib, milliseconds = json.loads(done.stdout)
    return mib, milliseconds


def print_peak(step: Callable[[], Sequence[Tensor]], *, warm_up: Callable[[], object]) -> None:
    """Print MiB beyond what was there and what the step returns, and its milliseconds.

    What a first step sets up is done in ``warm_up``.
    """
    warm_up()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from here on
    before, start = _kib("VmRSS"), time.perf_counter()
    returned = step()
    seconds = time.perf_counter() - start
    given = sum(tensor.numel() * tensor.element_size() for tensor in returned)
    beyond = (_kib("VmHWM") - before) * 1024 - given
    print(json.dumps([round(beyond / _MIB), round(seconds * 1e3, 1)]))


def report_peaks(
    ours: Peak,
    peer: Peak,
    *,
    benchmark: str,
    whom: str,
    case: dict[str, int | str],
    limit: float | None,
    threads: int,
) -> None:
    """Print one result whose ratio is that of peaks, and whose times are those of the steps."""
    (ours_mib, ours_ms), (peer_mib, peer_ms) = ours, peer
    case = {**case, "mib": ours_mib, "peer_mib": peer_mib}
    ratio = round(ours_mib / peer_mib, 3)
    result = Result(benchmark, whom, case, 1, threads, ours_ms, peer_ms, ratio, limit)
    print(json.dumps(asdict(result)), flush=True)


def _kib(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key + ":"))
