"""Where a sharded optimizer finds the gradients of what a rank owns.

Either they are reduced for it during backward, and each rank keeps its range of the sums; or
somebody else has reduced them, and they are whole on every rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megablocks_core.groups.gradient_shards import (
    GradientShard,
    ShardedGradient,
    set_gradient_shard,
)
from megablocks_core.parallel.data_parallel.reducer import Reducer
from megablocks_core.parallel.sharded_optimizer.flat_parameters import FlatParameters


class WholeGradients:
    """Gradients are whole on every rank, in ``parameter.grad``."""

    def of(self, flat: FlatParameters) -> dict[int, Tensor]:
        """By index, this rank's range of each gradient that there is, of one dimension."""
        found = {}
        for index, start, _, length in flat.ranges:
            gradient = flat.parameters[index].grad
            if gradient is not None:
                found[index] = gradient.reshape(-1)[start : start + length]
        return found

    def check(self) -> None:
        """Any gradients will do."""

    def drop(self) -> None:
        """Nothing is held beside ``parameter.grad``."""

    def used(self) -> None:
        """A step was taken: as with torch's optimizers, gradients stay until they are dropped."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Nothing is sent anyway."""
        return nullcontext()


class ReducedGradients:
    """Gradients are summed during backward, and each rank keeps its range of the sums.

    The ranges hang on the parameters (``gradient_shard``) from backward until they are used or
    dropped. ``parameter.grad`` is a stand-in that refuses to be read; setting it to ``None`` drops
    the range.

    Args:
        reducer: Sums them; its parameters are those of ``flats``, by index.
        flats: The weights, in buckets of the reducer.
        module: What runs forward, if it is known.
    """

    def __init__(
        self, reducer: Reducer, flats: Sequence[FlatParameters], module: nn.Module | None
    ) -> None:
        self._reducer, self._flats = reducer, flats
        numbers = {id(bucket): number for number, bucket in enumerate(reducer.buckets)}
        self._numbers = {id(flat): numbers[id(flat.bucket)] for flat in flats}
        # No cycle: an optimizer that nobody holds gives its parameters free at once.
        hang = weakref.WeakMethod(self._hang)
        reducer.after = lambda: (method := hang()) and method()
        if module is not None:
            watch = Watch(reducer, module)
            hooks = (
                module.register_forward_pre_hook(watch.before),
                module.register_forward_hook(watch.after),
            )
            weakref.finalize(reducer, _remove, hooks).atexit = False

    def of(self, flat: FlatParameters) -> dict[int, Tensor]:
        """By index, this rank's range of each gradient that there is, of one dimension."""
        total = self._reducer.shards[self._numbers[id(flat)]]
        if total is None:
            return {}
        return {
            index: total[offset : offset + length]
            for index, _, offset, length in flat.ranges
            if self._reducer.used[index]
        }

    def check(self) -> None:
        """Raise if there are gradients that were not reduced.

        Raises:
            RuntimeError: A backward was broken off, ran under ``no_sync`` and none followed
                outside, or somebody has set ``parameter.grad``.
        """
        self._reducer.check()
        if self._reducer.holds_own():
            raise RuntimeError(
                "gradients of no_sync() wait to be reduced: the last backward before a step must "
                "run outside"
            )
        self._reducer.forget_dropped()
        for name, parameter in zip(self._reducer.names, self._reducer.parameters, strict=True):
            if not isinstance(parameter.grad, (ShardedGradient, type(None))):
                raise RuntimeError(
                    f"the gradient of {name!r} was set by hand: this optimizer steps those that "
                    "a backward has reduced (set it to None, or use a DataParallel module)"
                )

    def drop(self) -> None:
        """Forget all gradients."""
        self._reducer.drop()
        for parameter in self._reducer.parameters:
            set_gradient_shard(parameter, None)

    def used(self) -> None:
        """A step was taken: the sums are forgotten, so that the next backward begins anew."""
        self.drop()

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward in it sends nothing; the next one outside reduces what has gathered."""
        return self._reducer.no_sync()

    def _hang(self) -> None:
        """After a backward: let norms and statistics see the ranges."""
        for flat in self._flats:
            found = self.of(flat)
            for own in flat.ranges:
                if own.index in found:
                    shard = GradientShard(found[own.index], own.start, flat.group)
                    set_gradient_shard(flat.parameters[own.index], shard)


class Watch:
    """Tells a reducer when its module runs; in copies of the module it does nothing.

    In compiled code neither: there, a rank whose loss reaches no parameter at all does not take
    part in the reduction.
    """

    def __init__(self, reducer: Reducer | None = None, module: nn.Module | None = None) -> None:
        self._reducer = _weak(reducer)
        self._module = _weak(module)

    def before(self, module: nn.Module, inputs: Any) -> None:
        """Before a forward pass."""
        if not torch.compiler.is_compiling() and (reducer := self._reducer_of(module)):
            reducer.check()

    def after(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """After it."""
        if not torch.compiler.is_compiling() and (reducer := self._reducer_of(module)):
            reducer.watch(outputs)

    def _reducer_of(self, module: nn.Module) -> Reducer | None:
        if module is self._module() and torch.is_grad_enabled():
            return self._reducer()
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return (Watch, ())


def _remove(hooks: Sequence[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def _weak(target: Any) -> Callable[[], Any]:
    return (lambda: None) if target is None else weakref.ref(target)
