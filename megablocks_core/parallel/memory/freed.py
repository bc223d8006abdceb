"""Outputs of a recomputed region that are freed once their consumer has run.

What the consumer saves of an output is a reference to the region, which gives the output again
when the consumer's backward asks. No memory is taken from anybody: who else holds the output,
or a part of it, goes on holding it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from megablocks_core.parallel.memory.held import Held, hooks_around


class Outputs:
    """The outputs of a region, and hooks that let consumers save a reference in their place."""

    def __init__(self) -> None:
        self.cache = _Cache()

    def noted(self, output: Any) -> Any:
        """The output, through ``_SaveOutputs``; the end of every run."""
        leaves, tree = pytree.tree_flatten(output)
        places = [i for i, leaf in enumerate(leaves) if _can_be_lost(leaf)]
        if places:
            noted = _SaveOutputs.apply(self.cache, *(leaves[i] for i in places))
            for i, y in zip(places, noted, strict=True):
                leaves[i] = y
        return pytree.tree_unflatten(leaves, tree)

    @contextmanager
    def watched(self, output: Any) -> Iterator[None]:
        """Around the consumer: what it saves of the outputs becomes a ``_Lost``."""
        outputs = [y for y in pytree.tree_leaves(output) if _can_be_lost(y)]
        if not outputs:
            yield
            return
        # Hooks hide those around them, which may be a region's or an offload's.
        outer_pack, outer_unpack = hooks_around() or (Held, Held.tensor)
        node, cache = outputs[0].grad_fn, self.cache
        versions = [y._version for y in outputs]

        def pack(x: Tensor) -> Any:
            place = _place(x, outputs, versions)
            return outer_pack(x) if place is None else _Lost(node, cache, place)

        def unpack(packed: Any) -> Tensor:
            return packed.found() if isinstance(packed, _Lost) else outer_unpack(packed)

        try:
            with saved_tensors_hooks(pack, unpack):
                yield
        finally:
            outputs.clear()  # The hooks live as long as the graph.


class _Place(NamedTuple):
    """Where in an output's memory a saved tensor lies."""

    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Lost:
    """Stands for a tensor that a consumer saved: the region behind ``node`` gives it again."""

    def __init__(self, node: Any, cache: "_Cache", place: _Place) -> None:
        self.node, self.cache, self.place = node, cache, place

    def found(self) -> Tensor:
        """The tensor."""
        # Detached: a cache that held the graph would be a circle.
        outputs = self.cache.outputs or [y.detach() for y in self.node.saved_tensors]
        self.cache.outputs = outputs
        output = outputs[self.place.index]
        _, size, stride, offset = self.place
        return output.as_strided(size, stride, output.storage_offset() + offset)


class _Cache:
    """Recomputed outputs, for as long as one walk of the graph needs them."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] | None = None


class _SaveOutputs(torch.autograd.Function):
    """Identity at the end of a region: its outputs are among what a second run finds."""

    @staticmethod
    def forward(ctx: Any, cache: _Cache, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.cache = cache
        ctx.save_for_backward(*outputs)
        return tuple(y.detach() for y in outputs)  # Views could not be changed in place.

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # All consumers are done.
        ctx.cache.outputs = None
        return (None, *grads)


def _can_be_lost(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _place(x: Tensor, outputs: Sequence[Tensor], versions: Sequence[int]) -> _Place | None:
    """Where ``x`` lies in one of the outputs, unless that was changed in place."""
    for index, (y, version) in enumerate(zip(outputs, versions, strict=True)):
        if (
            x.untyped_storage()._cdata == y.untyped_storage()._cdata
            and (x.dtype, x._version) == (y.dtype, version)
            and y.is_contiguous()
        ):
            offset = int(x.storage_offset() - y.storage_offset())
            reach = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
            if x.numel() and offset >= 0 and offset + reach < y.numel():
                return _Place(index, x.shape, x.stride(), offset)
    return None
