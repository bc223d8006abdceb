"""What a module of ``fully_shard`` does at the edges of each forward and backward pass.

Before a forward pass nothing gathered is left from earlier, so no weight is stale. After a backward
pass all ranks know which parameters none of them used. In the first step the order of the units is
taken down; from then on each gathers the next one early.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule

from megablocks_core.groups.marking import clean_name
from megablocks_core.parallel.fsdp.groups import (
    ParameterGroup,
    backward_broke_off,
    forward_broke_off,
    naming,
)
from megablocks_core.parallel.fsdp.prefetch import IndexedOrder, Recording


class Steps:
    """Hooks of one root.

    Args:
        root: The module.
        units: A module of each unit, by number.
        groups: All groups of parameters.
        alone: (owner, name) of parameters that no other rank holds.
        divisor: By what the gradients of these are divided, each time they come.
        prefetch: Whether units gather their successors early.
    """

    def __init__(
        self,
        root: FSDPModule,
        units: Sequence[FSDPModule],
        groups: Sequence[ParameterGroup],
        *,
        alone: Sequence[tuple[nn.Module, str]],
        divisor: int,
        prefetch: bool,
    ) -> None:
        self._root, self._units, self._groups = root, units, groups
        self._alone, self._divisor = alone, divisor
        self._scaled: dict[int, nn.Parameter] = {}
        self._recording: Recording | None = Recording() if prefetch else None
        self._in_backward = False
        assert isinstance(root, nn.Module)
        self._known = {(owner, name) for owner, name, _ in _parameters(root)}
        for group in groups:
            group.started = self._starts
        # torch's hook comes first unless another one is prepended after it.
        root.register_forward_pre_hook(self._before_forward, prepend=True)
        root.register_forward_hook(self._after_forward)

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # recomputed in backward
        if backward_broke_off(self._root):
            raise RuntimeError(
                "the last backward pass broke off, so ranks may wait for each other's messages: "
                "end all ranks and resume from a checkpoint, or, if every rank broke off at the "
                "same place, call reset_iter_state() on the module and zero_grad()"
            )
        if forward_broke_off(self._root):
            self._root.reset_iter_state()
        if self._in_backward:  # it broke off, and the user began anew
            self._in_backward = False
            for group in self._groups:
                group.drop()
        for group in self._groups:
            if group.reshard_after_backward:
                group.settle()
            group.follow_frozen()
        self._check_parameters(module)
        self._scale_alone()

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            # No backward pass will free them, and the optimizer knows the slices only.
            for group in self._groups:
                group.settle()

    def _check_parameters(self, module: nn.Module) -> None:
        if sum(len(part._parameters) for part in module.modules()) == len(self._known):
            return
        names = [
            clean_name(path)
            for owner, name, path in _parameters(module)
            if (owner, name) not in self._known
        ]
        if names:
            raise ValueError(
                f"parameters {names} were added after fully_shard: no rank would reduce their "
                "gradients; add them before"
            )

    def _scale_alone(self) -> None:
        """Divide each fresh gradient of what lies on this rank alone, once."""
        if self._divisor == 1:
            return
        for place, (owner, name) in enumerate(self._alone):
            parameter = owner._parameters[name]
            if parameter is None or not parameter.requires_grad:
                continue
            if self._scaled.get(place) is not parameter:
                self._scaled[place] = parameter
                parameter.register_hook(self._divided)

    def _divided(self, gradient: Tensor) -> Tensor:
        return gradient / self._divisor

    def _starts(self, unit: int, backward: bool) -> None:
        if backward and not self._in_backward:
            self._in_backward = True
            # Torch's own callback, which reduces what is left, was queued before this one.
            Variable._execution_engine.queue_callback(self._after_backward)
        if backward or torch.is_grad_enabled():
            self._record(unit, backward)

    def _record(self, unit: int, backward: bool) -> None:
        if self._recording is not None:
            units = self._recording.backward if backward else self._recording.forward
            if not units or units[-1] != unit:
                units.append(unit)

    def _after_backward(self) -> None:
        self._in_backward = False
        if self._recording is not None:
            self._prefetch_by(*self._recording.orders())
            self._recording = None
        synced = [group for group in self._groups if group.reduce_grads]
        for expert in (False, True):
            self._agree([group for group in synced if group.kind.expert is expert])

    def _agree(self, groups: list[ParameterGroup]) -> None:
        """Combine over the ranks which parameters were used: one byte for each."""
        if not groups:
            return
        flags = [flag for group in groups for flag in group.flags()]
        used = torch.tensor(flags, dtype=torch.uint8, device=groups[0].device)
        for ranks in groups[0].place[:2]:
            if ranks.size > 1:
                with naming("flags of the parameters used", ranks):
                    used = ranks.all_reduce(used, "max")
        found = used.tolist()
        for group in groups:
            length = len(group.fsdp_params)
            group.end(found[:length])
            del found[:length]

    def _prefetch_by(self, forward: IndexedOrder, backward: IndexedOrder) -> None:
        for number, unit in enumerate(self._units):
            following = forward.successor(number)
            if following is not None:
                unit.set_modules_to_forward_prefetch([self._units[following]])
            following = backward.successor(number)
            if following is not None:
                unit.set_modules_to_backward_prefetch([self._units[following]])


def _parameters(module: nn.Module) -> list[tuple[nn.Module, str, str]]:
    """(owner, name there, path), once for each owner; what is ``None`` has a place too."""
    return [
        (owner, name, f"{prefix}.{name}" if prefix else name)
        for prefix, owner in module.named_modules()
        for name in owner._parameters
    ]
