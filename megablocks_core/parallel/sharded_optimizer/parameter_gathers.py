"""Messages that bring updated weights to all ranks, and who waits for them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from torch import nn

from megablocks_core.groups.buffers import Handle
from megablocks_core.parallel.sharded_optimizer.flat_parameters import FlatParameters
from megablocks_core.parallel.sharded_optimizer.late_parameters import LateParameters


class ParameterGathers:
    """The gathers in flight.

    Args:
        buckets: The weights, in the order in which their gathers are started.
    """

    def __init__(self, buckets: Iterable[FlatParameters]) -> None:
        self._flying: dict[int, Handle] = {}
        self._late: list[LateParameters] = []
        self._bucket_of = {
            id(parameter): id(flat) for flat in buckets for parameter in flat.parameters.values()
        }

    def start(self, flat: FlatParameters) -> None:
        """Start to gather one bucket."""
        handle = flat.start_gather()
        if handle is not None:
            self._flying[id(flat)] = handle

    def wait(self) -> None:
        """Wait for all that fly."""
        self._wait_for(list(self._flying))
        for late in self._late:
            late.settled()
        self._late = []

    def hide(self, module: nn.Module) -> None:
        """Let whoever reads a parameter through ``module`` wait for its bucket.

        Compiled code, which would be compiled anew for a dict of another kind, waits here.
        """
        owners = list(module.modules())
        if any(owner._compiled_call_impl is not None for owner in owners):
            self.wait()
        for owner in owners:
            found = {self._bucket_of.get(id(parameter)) for parameter in owner._parameters.values()}
            behind = [number for number in self._flying if number in found]
            if behind:
                self._late.append(LateParameters(owner, partial(self._wait_for, behind)))

    def _wait_for(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            handle = self._flying.pop(number, None)
            if handle is not None:
                handle.wait()
