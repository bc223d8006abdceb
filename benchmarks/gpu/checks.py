"""What a check is, how errors are measured, and how a GPU is timed."""

from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megablocks_core.parallel.optional import is_installed

Figures = dict[str, Any]


class Absent(Exception):
    """What a check is of is not on this machine; its words say what."""


class Check(NamedTuple):
    """Something that must hold on a device.

    Attributes:
        name: What is checked.
        needs_cuda: It says nothing on a CPU.
        run: Raises if it does not hold, or ``Absent``; gives figures.
    """

    name: str
    needs_cuda: bool
    run: Callable[[torch.device], Figures]


def require(module: str | None) -> None:
    """Raise ``Absent`` if a package is not installed; ``None`` is always there."""
    if module is not None and not is_installed(module):
        raise Absent(f"{module} is not installed")


def error_of(ours: Tensor, right: Tensor) -> float:
    """The norm of the difference over the norm of what is right, in float64."""
    right = right.double()
    difference = torch.linalg.vector_norm(ours.double() - right)
    return (difference / torch.linalg.vector_norm(right).clamp(min=1e-30)).item()


def milliseconds(work: Callable[[], Any], *, warm_ups: int = 5, rounds: int = 20) -> float:
    """Median time of ``work`` on the current GPU, by its own events."""
    for _ in range(warm_ups):
        work()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return round(median(times), 4)


def product_rate(device: torch.device, size: int = 8192) -> float:
    """Operations a second of a large product in bfloat16, which is the limit for others."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / (milliseconds(lambda: a @ b) / 1e3)
