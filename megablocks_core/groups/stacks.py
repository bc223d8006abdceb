"""Stacked tensors (experts' weights [E O I]) under the separate names that their marks give.

``mark(..., each="experts.{}.up_proj.weight")`` says that dimension 0 of a parameter stacks
tensors with names of their own, counted from the parent of the module that owns it. Files and
state dicts hold those; the module holds the stack.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megablocks_core.groups.cuts import Box, ShardSpec, Specs, held_ranges, whole_shape
from megablocks_core.groups.placements import local, placement_specs


def separate_name(name: str, each: str, index: int | str) -> str:
    """The name of tensor ``index`` of the stack with logical name ``name``."""
    parent = name.rpartition(".")[0].rpartition(".")[0]
    own = each.replace("{}", str(index))
    return f"{parent}.{own}" if parent else own


def separate_names(name: str, each: str, length: int) -> list[str]:
    """The names of all ``length`` tensors of a stack, in order."""
    return [separate_name(name, each, index) for index in range(length)]


def unstacked(name: str, tensor: Tensor, specs: Specs) -> Iterator[tuple[str, Tensor, Specs]]:
    """Yield (name, tensor, specs) of the tensors of a stack of which this rank holds a share.

    They are views of ``tensor``, of a DTensor's local part. What is no stack comes as it is.
    """
    if specs.each is None:
        yield name, tensor, specs
        return
    cuts, share = (*specs, *placement_specs(tensor)), local(tensor.detach())
    held, *_ = held_ranges(whole_shape(tuple(share.shape), cuts), cuts)
    indices = [index for part in held for index in range(part.start, part.stop)]
    inside = tuple(
        ShardSpec(spec.dim - 1, spec.group, spec.segments) for spec in cuts if spec.dim > 0
    )
    for index, view in zip(indices, share, strict=True):
        yield separate_name(name, specs.each, index), view, Specs(inside, expert=specs.expert)


class Stack:
    """Separate tensors, or lazy slices of files, seen as the stack of them; nothing is read yet.

    Args:
        tensors: By name.
        names: Those of the stack, in order.

    Attributes:
        kind: Of their numbers.

    Raises:
        ValueError: The tensors differ in shape or in kind.
    """

    def __init__(self, tensors: Mapping[str, Any], names: list[str]) -> None:
        self._parts = [tensors[name] for name in names]
        first = shape_of(self._parts[0])
        for name, part in zip(names, self._parts, strict=True):
            if shape_of(part) != first:
                raise ValueError(
                    f"tensors[{name!r}] of shape {shape_of(part)} must have shape {first}, that "
                    f"of {names[0]}"
                )
            if kind_of(part) != kind_of(self._parts[0]):
                raise ValueError(
                    f"tensors[{name!r}] of {kind_of(part)} numbers must have "
                    f"{kind_of(self._parts[0])} ones, as {names[0]}"
                )
        self._shape = (len(names), *first)
        self.kind = kind_of(self._parts[0])

    def get_shape(self) -> tuple[int, ...]:
        """The shape of the stack."""
        return self._shape

    def __getitem__(self, box: Box) -> Tensor:
        which, *inside = box
        parts = self._parts[which]
        return torch.stack([part[tuple(inside)] if inside else part[...] for part in parts])


def stacked(
    tensors: Mapping[str, Any], wanted: Iterable[tuple[str, Tensor, Specs]]
) -> dict[str, Any]:
    """``tensors``, in which those that a wanted stack is made of have become one, under its name.

    Raises:
        ValueError: Some tensors of a stack are given, but not all, or their shapes differ.
    """
    given = dict(tensors)
    for name, tensor, specs in wanted:
        if specs.each is None or name in given:
            continue
        names = separate_names(name, specs.each, whole_shape(tuple(tensor.shape), specs)[0])
        missing = [part for part in names if part not in given]
        if len(missing) < len(names):
            if missing:
                raise ValueError(f"tensors must have all that {name} stacks: missing {missing}")
            given[name] = Stack(given, names)
            for part in names:
                del given[part]
    return given


def shape_of(whole: Any) -> tuple[int, ...]:
    """The shape of a tensor, or of a lazy slice as safetensors gives it."""
    return tuple(whole.shape if isinstance(whole, Tensor) else whole.get_shape())


def kind_of(whole: Any) -> str:
    """The kind of its numbers: "floating-point", "complex" or "whole"."""
    if isinstance(whole, Stack):
        return whole.kind
    if not isinstance(whole, Tensor):
        dtype = whole.get_dtype()  # such as "BF16", "F8_E4M3", "C64", "I64"
        complex_, floating = dtype.startswith("C"), dtype.startswith(("F", "BF"))
    else:
        complex_, floating = whole.is_complex(), whole.is_floating_point()
    return "complex" if complex_ else "floating-point" if floating else "whole"
