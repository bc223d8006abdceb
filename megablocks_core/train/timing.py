"""Where a step's time goes, and what the machines did meanwhile.

Every figure is a ``Mean``, a sum and what it is per, so lines of a run add up: seconds and steps,
tokens and seconds, seconds waited and seconds watched.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch

from megablocks_core.groups import LOCAL, Group, check_group, gather_from
from megablocks_core.train.communication import CommunicationSample
from megablocks_core.train.machine import (
    cpu_seconds,
    network_bytes,
    peak_memory_bytes,
    usable_cores,
)
from megablocks_core.train.metrics import Mean

PHASES = ("data", "forward", "backward", "reduction", "optimizer")
BESIDE = ("checkpoint", "evaluation")  # between steps: not part of a step's seconds
_NOTHING = nullcontext()
_COUNTED = (
    "steps",
    "seconds",
    "tokens",
    "own_tokens",
    "read_bytes",
    "watched",
    "waited",
    "device_watched",
    "device_busy",
)


class StepTimer:
    """Times steps and their phases on each rank, and reduces over ``group`` in one message.

        timer = StepTimer(group=world, sample_every=50)
        with timer("data"):
            batch = next(batches)
        ...
        timer.step(tokens=tokens_of_the_whole_step)
        timer.reduce()["step_seconds"]

    ``group`` is all ranks. Within one phase another may run: each second belongs to the innermost.
    The phases ``checkpoint`` and ``evaluation`` lie between steps. Every ``sample_every`` steps
    (0: never; the first step is not looked at) a profiler watches how long the rank waits for
    others; see ``communication``. On an accelerator the host's clock sees when work was handed
    over, so only whole steps are right there. ``device`` is where the message lies (NCCL). With
    ``enabled=False`` a timer measures and sends nothing, and ``reduce`` gives nothing.

    Sent: one gather of host names and cores here; nothing by ``step``; one gather of about 200
    bytes a rank by ``reduce``.

    Raises:
        ValueError: ``phases`` with a name twice, or a phase that was not given.
    """

    def __init__(
        self,
        *,
        phases: tuple[str, ...] = PHASES,
        sample_every: int = 0,
        enabled: bool = True,
        group: Group = LOCAL,
        device: torch.device | str | None = None,
    ) -> None:
        check_group(group)
        if len(set(phases + BESIDE)) < len(phases + BESIDE):
            raise ValueError(f"phases={phases} must be different names, and none of {BESIDE}")
        self.phases, self.group, self.device = phases, group, device
        self._sample_every = sample_every
        self._sample: CommunicationSample | None = None
        self._num_steps = 0
        self._inside: list[float] = []  # per phase entered: seconds of the phases inside it
        self._enabled = enabled
        if enabled:
            self._speaks_for_host, self._host_cores = _host(group)
            self._start_again(_read_clocks())
            self._step_began = time.perf_counter()

    def __call__(self, phase: str) -> AbstractContextManager[None]:
        """Time what runs inside as ``phase``."""
        if phase not in self.phases + BESIDE:
            raise ValueError(f"phase={phase!r} must be one of {self.phases + BESIDE}")
        return self._timed(phase) if self._enabled else _NOTHING

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        if phase not in BESIDE:
            self._sample_if_due()
        self._inside.append(0.0)
        began = time.perf_counter()
        try:
            yield
        except BaseException:
            self._abandon_sample()  # a profiler that is left on may crash the interpreter's exit
            raise
        finally:
            elapsed = time.perf_counter() - began
            own = elapsed - self._inside.pop()
            if self._inside:
                self._inside[-1] += elapsed
            self._sums[phase] += own
            if phase in BESIDE:
                self._sums[phase + " times"] += 1
                self._step_began += own

    def step(self, *, tokens: int, own_tokens: int | None = None, read_bytes: int = 0) -> None:
        """A step ends here: ``tokens`` of all ranks, ``own_tokens`` and ``read_bytes`` of this."""
        if not self._enabled:
            return
        now = time.perf_counter()
        sums = self._sums
        sums["steps"] += 1
        sums["seconds"] += now - self._step_began
        sums["tokens"] += tokens
        sums["own_tokens"] += tokens if own_tokens is None else own_tokens
        sums["read_bytes"] += read_bytes
        if self._sample is not None:
            watched, seen = now - self._sample_began, self._sample.stop()
            sums["watched"] += watched
            sums["waited"] += seen.waited
            if seen.busy is not None:
                sums["device_watched"] += watched
                sums["device_busy"] += seen.busy
            self._sample = None
        self._num_steps += 1
        self._step_began = time.perf_counter()

    def reduce(self) -> dict[str, Mean]:
        """The figures of all ranks since the last call, then from zero again.

        Times are means over the ranks, bytes and processor time sums, memory the largest rank's.
        Utilisation is that of the accelerators in sampled steps, or else of the processors. A
        figure that nothing was measured for is left out.
        """
        if not self._enabled:
            return {}
        reading = _read_clocks()
        own = {**self._sums, **self._machine(self._before, reading)}
        self._start_again(reading)
        row = torch.tensor([list(own.values())], dtype=torch.float64, device=self.device)
        rows = gather_from(row, dim=0, group=self.group, sizes=[1] * self.group.size).cpu()
        total = dict(zip(own, rows.sum(0).tolist(), strict=True))
        mean = dict(zip(own, rows.mean(0).tolist(), strict=True))
        most = dict(zip(own, rows.amax(0).tolist(), strict=True))
        wall, steps = mean["wall"], mean["steps"]
        pairs = {
            "step_seconds": (mean["seconds"], steps),
            "tokens_per_second": (mean["tokens"], mean["seconds"]),
            "token_balance": (most["own_tokens"], mean["own_tokens"]),
            "data_wait_share": (mean.get("data", 0.0), mean["seconds"]),
            "communication_wait_share": (mean["waited"], mean["watched"]),
            "utilisation": (mean["device_busy"], mean["device_watched"])
            if mean["device_watched"]
            else (total["cpu_seconds"], wall * total["cores"]),
            "peak_memory_bytes": (most["peak_memory"], 1.0),
            "network_bytes_per_second": (total["network"], wall if total["tells_network"] else 0),
            "read_bytes_per_second": (total["read_bytes"], wall if total["read_bytes"] else 0),
            **{
                f"{phase}_seconds": (mean[phase], steps if mean[phase] else 0)
                for phase in self.phases
            },
            **{f"{phase}_seconds": (mean[phase], mean[phase + " times"]) for phase in BESIDE},
        }
        return {name: Mean(*pair) for name, pair in pairs.items() if pair[1]}

    def _machine(self, before: _Reading, now: _Reading) -> dict[str, float]:
        """This rank's share of what the machine did between two readings."""
        speaks = self._speaks_for_host
        return {
            "wall": now.wall - before.wall,
            "cpu_seconds": now.cpu - before.cpu,
            "cores": self._host_cores if speaks else 0,
            "peak_memory": peak_memory_bytes(),
            "tells_network": now.network is not None,
            "network": (now.network or 0) - (before.network or 0) if speaks else 0,
        }

    def _start_again(self, reading: _Reading) -> None:
        times = tuple(phase + " times" for phase in BESIDE)
        self._sums = dict.fromkeys((*_COUNTED, *self.phases, *BESIDE, *times), 0.0)
        self._before = reading

    def _abandon_sample(self) -> None:
        sample, self._sample = self._sample, None
        if sample is not None:
            sample.stop()

    def _sample_if_due(self) -> None:
        every = self._sample_every
        due = every > 0 and self._num_steps > 0 and (self._num_steps - 1) % every == 0
        if due and self._sample is None:
            before = time.perf_counter()
            self._sample = CommunicationSample()
            self._sample.start()
            self._sample_began = time.perf_counter()
            self._step_began += self._sample_began - before


class _Reading(NamedTuple):
    """What the clocks said: seconds, seconds of processor time, bytes sent by the machine."""

    wall: float
    cpu: float
    network: int | None


def _read_clocks() -> _Reading:
    return _Reading(time.perf_counter(), cpu_seconds(), network_bytes())


def _host(group: Group) -> tuple[bool, int]:
    """Whether this rank speaks for its host, and how many cores the host's ranks may use."""
    places = group.all_gather_object((platform.node(), usable_cores()))
    own = places[group.rank][0]
    here = [rank for rank, (host, _) in enumerate(places) if host == own]
    return here[0] == group.rank, len(set().union(*(places[rank][1] for rank in here)))
