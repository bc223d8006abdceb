"""The mean of the weights of several checkpoints, summed in float64."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megablocks_core.ckpt.tools.checkpoint import Checkpoint, Held
from megablocks_core.ckpt.tools.drafting import write_checkpoint
from megablocks_core.ckpt.tools.opening import open_checkpoint
from megablocks_core.files.progress import Progress
from megablocks_core.groups.cuts import Box


def average(paths: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> None:
    """Write the checkpoint ``out``: modules and tensors, the mean of those in ``paths``.

    Each value is a sum in float64, divided once and rounded to the dtype it had. What is not
    floating-point must be equal in all. Optimizers and JSON values are left out; files beside
    the tensors are kept where they are equal in all.

    Args:
        paths: Two or more checkpoints with the same modules and tensors, shapes and dtypes.
        out: A new or empty folder.

    Raises:
        ValueError: The checkpoints do not match, or ``out`` is not empty.
        CheckpointError: One is damaged.
    """
    if len(paths) < 2:
        raise ValueError(f"paths={list(map(str, paths))} must be two or more checkpoints")
    checkpoints = [open_checkpoint(path) for path in paths]
    weights = [_weights(checkpoint) for checkpoint in checkpoints]
    for path, mine in zip(paths[1:], weights[1:], strict=True):
        _check_alike(str(paths[0]), weights[0], str(path), mine)
    if not weights[0]:
        raise ValueError(f"{paths[0]} has no weights to average")
    entries = {name.partition("/")[0] for name in weights[0]}
    state = {name: one for name, one in checkpoints[0].state.items() if name in entries}
    besides = [checkpoint.beside() for checkpoint in checkpoints]
    common = {
        file: data
        for file, data in besides[0].items()
        if all(beside.get(file) == data for beside in besides)
    }
    mean = _Mean(checkpoints, paths, weights[0])
    write_checkpoint(
        out,
        state,
        weights[0],
        mean.of,
        files=common,
        progress=Progress("average", sum(held.nbytes for held in weights[0].values())),
    )


def _weights(checkpoint: Checkpoint) -> dict[str, Held]:
    return {
        name: held
        for name, held in checkpoint.tensors.items()
        if checkpoint.state[name.partition("/")[0]]["kind"] in ("module", "tensor")
    }


def _check_alike(first: str, a: dict[str, Held], second: str, b: dict[str, Held]) -> None:
    for name in sorted(a.keys() ^ b.keys()):
        has, lacks = (first, second) if name in a else (second, first)
        raise ValueError(f"{name!r} is in {has} but not in {lacks}")
    for name, held in a.items():
        if held != b[name]:
            raise ValueError(
                f"{name!r} is {held.dtype} {list(held.shape)} in {first} but {b[name].dtype} "
                f"{list(b[name].shape)} in {second}"
            )


class _Mean:
    """Means of tensors, slab by slab, in one float64 buffer."""

    def __init__(
        self,
        checkpoints: Sequence[Checkpoint],
        paths: Sequence[str | os.PathLike[str]],
        weights: Mapping[str, Held],
    ) -> None:
        self._checkpoints, self._paths, self._weights = checkpoints, paths, weights
        self._buffer = torch.empty(0, dtype=torch.float64)

    def of(self, name: str) -> Tensor:
        held = self._weights[name]
        out = torch.empty(held.shape, dtype=held.dtype)
        for box in held.slabs():
            out[box] = self._slab(name, box)
        return out

    def _slab(self, name: str, box: Box) -> Tensor:
        first = self._checkpoints[0].read(name, box)
        if not first.is_floating_point():
            for path, other in zip(self._paths[1:], self._checkpoints[1:], strict=True):
                if not torch.equal(other.read(name, box), first):
                    raise ValueError(
                        f"{name!r} of dtype {first.dtype} has no mean and must be equal in "
                        f"{self._paths[0]} and {path}"
                    )
            return first
        if self._buffer.numel() < first.numel():
            self._buffer = torch.empty(first.numel(), dtype=torch.float64)
        total = self._buffer[: first.numel()].view(first.shape).copy_(first)
        for checkpoint in self._checkpoints[1:]:
            total += checkpoint.read(name, box)
        return total.div_(len(self._checkpoints))
