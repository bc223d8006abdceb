"""An exponential moving average of a model's weights, as they are cut."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from megablocks_core.groups import LOCAL, Group, check_group, marks
from megablocks_core.groups.messages import sum_flat
from megablocks_core.groups.placements import is_dtensor, local
from megablocks_core.parallel.checks import (
    check_mapping,
    check_module,
    check_number,
    check_whole,
)
from megablocks_core.parallel.published import Field, Published, cut_alike

_AVERAGE, _MASTER = "average", "master"


class Masters(Protocol):
    """An optimizer that publishes "master" fields."""

    def logical_state(self) -> Any:
        """Its fields: (parameter, name, tensor, range)."""
        ...


class MovingAverage:
    """Averages the weights that are trained, and lends them to evaluation.

        average = MovingAverage(model, 0.999)
        ...
        optimizer.step()
        average.update()
        ...
        with average.swap():
            evaluate(model)
        ckpt.save(path, {"model": model, "average": average}, group=world)

    Each update ``t``, counted from 1: ``average <- d average + (1 - d) weight`` with ``d`` the
    smaller of ``decay`` and ``(1 + t) / (warmup + t)``. Averages are float32, or float64 for
    float64 weights. Each rank averages what it holds, so nothing is sent: a slice by marks, a
    DTensor's shard, or a replica. With ``masters``, 16-bit weights are averaged from the float32
    copies of the optimizer, of which each rank may hold ranges only.

    Memory: the average of what is averaged, and inside ``swap`` a copy of the weights.

    Sent: nothing by ``update``. With ``masters``, ``swap`` sums the 16-bit weights over ``group``
    (those of experts over ``expert_group``), in float32.

    Args:
        module: The model. Weights that are frozen have no average.
        decay: From 0 to below 1.
        warmup: At least 1, which is none.
        masters: The optimizer, ``ShardedOptimizer`` or ``Muon``, that holds the copies.
        group: The ranks that hold the copies together; with hybrid sharding, not the replicas.
        expert_group: Those of experts.

    Raises:
        ValueError: An argument is out of range, or a 16-bit weight has no whole copy on
            ``group``.
    """

    def __init__(
        self,
        module: nn.Module,
        decay: float,
        *,
        warmup: float = 10.0,
        masters: Masters | None = None,
        group: Group = LOCAL,
        expert_group: Group = LOCAL,
    ) -> None:
        check_group(group)
        check_group(expert_group, "expert_group")
        check_module(module)
        check_number("decay", decay, "from 0 to below 1", lambda x: 0 <= x < 1)
        check_number("warmup", warmup, "at least 1, and finite", lambda x: 1 <= x < math.inf)
        if masters is not None and not callable(getattr(masters, "logical_state", None)):
            raise ValueError(f"masters={masters!r} must be an optimizer that has logical_state()")
        self.decay, self.warmup = decay, warmup
        self._module, self._masters = module, masters
        self._groups = {False: group, True: expert_group}
        self._updates, self._swapped = 0, False
        self._averages: dict[str, list[Tensor]] = {}
        sources = self._sources()
        if masters is not None:
            self._require_whole_masters(sources)
        self._averages = {
            name: [source.live.to(_wide(source.live), copy=True) for source in found]
            for name, found in sources.items()
        }

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights of now into the average.

        Raises:
            ValueError: A weight is trained that was frozen at construction, or the weights are
                swapped.
        """
        self._check_not_swapped()
        sources = self._sources()
        if new := sorted(set(sources) - set(self._averages)):
            raise ValueError(f"{new} must be trained when the average is made")
        self._updates += 1
        decay = min(self.decay, (1 + self._updates) / (self.warmup + self._updates))
        for name, averages in self._averages.items():
            for average, source in zip(averages, sources[name], strict=True):
                average.lerp_(source.live.to(average.dtype), 1 - decay)

    @contextmanager
    def swap(self) -> Iterator[None]:
        """Inside, the weights are the averages; afterwards they are what they were.

        Backward through an output from before raises, as the weights have changed. Every rank
        must enter it.

        Raises:
            ValueError: The weights are swapped already.
        """
        self._check_not_swapped()
        self._swapped = True
        try:
            weights = {name: local(p).detach() for name, p, _ in self._averaged()}
            kept = {name: weight.clone() for name, weight in weights.items()}
            try:
                self._put()
                yield
            finally:
                self._settle()
                with torch.no_grad():
                    for name, weight in weights.items():
                        weight.copy_(kept[name])
        finally:
            self._swapped = False

    def logical_state(self) -> Published:
        """The averages by parameter; ``ckpt.save`` and ``load`` call it."""
        fields: list[Field] = [
            (source.parameter, _AVERAGE, cut_alike(average, source.parameter), source.flat)
            for name, found in self._sources().items()
            for source, average in zip(found, self._averages[name], strict=True)
        ]
        return Published(fields, {"updates": self._updates})

    def load_logical_values(self, values: Mapping[str, Any]) -> None:
        """Take over the number of updates; the averages were filled before.

        Raises:
            ValueError: It lacks the number.
        """
        check_mapping("values", values, ("updates",))
        check_whole("updates", values["updates"], least=0)
        self._updates = values["updates"]

    def _check_not_swapped(self) -> None:
        if self._swapped:
            raise ValueError("the weights must not be swapped for their averages")

    def _settle(self) -> None:
        """Let go of gathered weights of FSDP2, which would be used in place of changed ones."""
        for part in self._module.modules():
            if hasattr(part, "reshard"):
                part.reshard()  # pyright: ignore[reportCallIssue]

    def _averaged(self) -> Iterator[tuple[str, Tensor, bool]]:
        """(name, parameter, whether it is an expert's) of each that has an average."""
        self._settle()
        for name, parameter, specs in marks(self._module):
            if name in self._averages:
                yield name, parameter, specs.expert

    def _sources(self) -> dict[str, list[_Source]]:
        """What is or is to be averaged of each parameter, as this rank holds it."""
        self._settle()
        masters: dict[int, list[_Source]] = {}
        if self._masters is not None:
            for parameter, field, tensor, flat in self._masters.logical_state().fields:
                if field == _MASTER:
                    source = _Source(parameter, local(tensor), flat)
                    masters.setdefault(id(parameter), []).append(source)
        found: dict[str, list[_Source]] = {}
        for name, parameter, _ in marks(self._module):
            if parameter.requires_grad or name in self._averages:
                own = [_Source(parameter, local(parameter).detach(), None)]
                of_masters = self._masters is not None and parameter.dtype.itemsize < 4
                found[name] = masters.get(id(parameter), []) if of_masters else own
        return found

    def _require_whole_masters(self, sources: Mapping[str, list[_Source]]) -> None:
        for expert, group in self._groups.items():
            named = [
                (name, local(parameter))
                for name, parameter, specs in marks(self._module)
                if name in sources
                and parameter.dtype.itemsize < 4
                and specs.expert == expert
                and not is_dtensor(parameter)
            ]
            if not named:
                continue
            held = [sum(source.size for source in sources[name]) for name, _ in named]
            total = group.all_reduce(torch.tensor(held, device=named[0][1].device)).tolist()
            short = [
                name for (name, p), count in zip(named, total, strict=True) if count != p.numel()
            ]
            if short:
                raise ValueError(f"{short} must each have one master on the ranks of {group}")

    @torch.no_grad()
    def _put(self) -> None:
        """Write the averages into the weights; ranges are put together over their group."""
        sources = self._sources()
        ranges: dict[bool, list[tuple[Tensor, Tensor]]] = {False: [], True: []}
        for name, parameter, expert in self._averaged():
            weight = local(parameter).detach()
            pairs = list(zip(sources[name], self._averages[name], strict=True))
            shared = self._masters is not None and weight.dtype.itemsize < 4
            if not shared or is_dtensor(parameter):
                weight.copy_(self._averages[name][0])
                continue
            whole = torch.zeros(weight.numel(), dtype=weight.dtype, device=weight.device)
            for source, average in pairs:
                start, stop = source.flat or (0, weight.numel())
                stop = min(stop, weight.numel())
                whole[start:stop] = average.reshape(-1)[: stop - start]
            ranges[expert].append((weight, whole.view(weight.shape)))
        for expert, found in ranges.items():
            group = self._groups[expert]
            wholes = [whole for _, whole in found]
            if group.size > 1 and wholes:
                wholes = sum_flat(wholes, group=group)
            for (weight, _), whole in zip(found, wholes, strict=True):
                weight.copy_(whole)


class _Source(NamedTuple):
    """What is averaged: a weight or a master, or a range of one."""

    parameter: Tensor
    live: Tensor
    flat: tuple[int, int] | None

    @property
    def size(self) -> int:
        """Elements of the parameter that it holds, without padding."""
        if self.flat is None:
            return self.live.numel()
        return min(self.flat[1], self.parameter.numel()) - self.flat[0]


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.dtype.itemsize < 4 else tensor.dtype
