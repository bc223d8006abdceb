"""What hooks in backward ask of autograd's graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def tensors_in(nest: Any) -> Iterator[Tensor]:
    """The tensors in lists, dicts, tuples and dataclasses."""
    for leaf in pytree.tree_leaves(nest):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from tensors_in(getattr(leaf, field.name))


def reaches(node: Any, wanted: set[Any]) -> bool:
    """Whether any of the wanted nodes lies in the graph below ``node``."""
    seen, ahead = set(), [node]
    while ahead:
        node = ahead.pop()
        if node in wanted:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            ahead += [below for below, _ in node.next_functions]
    return False
