"""What the machine is and what it has done: hardware, peak arithmetic, memory, network."""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

from megablocks_core.groups import LOCAL, Group


def hardware() -> dict[str, Any]:
    """Processor model, cores this process may use, bytes of memory, accelerators by name."""
    accelerators = range(torch.cuda.device_count())
    return {
        "cpu": _cpu_model(),
        "cores": len(usable_cores()),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "accelerators": [torch.cuda.get_device_name(index) for index in accelerators],
    }


def usable_cores() -> set[int]:
    """Numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def cpu_seconds() -> float:
    """Processor time this process has used, in all its threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def peak_memory_bytes() -> int:
    """The most memory this process has held; on an accelerator, the most its allocator held."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def network_bytes() -> int | None:
    """Bytes that this machine has sent on all interfaces, loopback too; ``None`` if not told.

    The counter is the machine's (on Linux: the network namespace's), not this process's.
    """
    table = Path("/proc/net/dev")
    if not table.exists():
        return None
    rows = table.read_text().splitlines()[2:]
    return sum(int(row.split(":", 1)[1].split()[8]) for row in rows)


def matmul_peak(
    *,
    size: int = 1024,
    seconds: float = 0.3,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    group: Group = LOCAL,
) -> float:
    """The best rate of a square matrix product, in FLOP/s, summed over ``group``.

    All ranks measure at once, each with the threads it has, so that ranks that share a machine
    share its rate. This is the peak that MFU is a share of where no data sheet gives one.

    Sent: a barrier and one all-reduce of 8 bytes.
    """
    a, b = torch.ones(2, size, size, dtype=dtype, device=device)
    out = torch.empty_like(a)
    group.barrier()
    best, end = 0.0, time.perf_counter() + seconds
    while best == 0.0 or time.perf_counter() < end:
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        out[0, 0].item()  # waits for an accelerator
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
    rates = torch.tensor(best, dtype=torch.float64, device=device)
    return group.all_reduce(rates).item()


def _cpu_model() -> str:
    table = Path("/proc/cpuinfo")
    if table.exists():
        for row in table.read_text().splitlines():
            if row.startswith("model name"):
                return row.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
