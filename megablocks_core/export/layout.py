"""Which tensors the files of a model hold, and which of our logical tensors each is made of.

No process group and no file is touched here: who holds which slice is said by marks alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Shape = tuple[int, ...]
Shapes = dict[str, Shape]


@dataclass(frozen=True)
class OnDisk:
    """One tensor of the files.

    Attributes:
        name: Its name there.
        shape: Of the whole.
        parts: Our logical tensors, of one shape; their rows one behind the other are its rows.
        stacked: Its first dimension is that of the experts, of which each has as many parts.
    """

    name: str
    shape: Shape
    parts: tuple[str, ...]
    stacked: bool = False

    @property
    def part_shape(self) -> Shape:
        """The shape of each part."""
        rows, *rest = self.shape[1:] if self.stacked else self.shape
        inside = len(self.parts) // self.shape[0] if self.stacked else len(self.parts)
        return (rows // inside, *rest)


@dataclass(frozen=True)
class Layout:
    """All tensors of a model's files.

    Attributes:
        tensors: In the order of the model.
        ties: On-disk name of a tensor that is left out, and of the one that it equals.
        ignored: Names of tables that old files hold and nobody reads, "{}" for a number.
    """

    tensors: tuple[OnDisk, ...]
    ties: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    @property
    def schema(self) -> Shapes:
        """On-disk name and whole shape of every tensor."""
        return {tensor.name: tensor.shape for tensor in self.tensors}

    @property
    def tied_parts(self) -> dict[str, str]:
        """``ties`` by logical names; what is left out has one name on either side."""
        parts = {tensor.name: tensor.parts[0] for tensor in self.tensors}
        return {name: parts[twin] for name, twin in self.ties.items()}

    def ignores(self, name: str) -> bool:
        """Whether an on-disk tensor is one that nobody reads."""
        patterns = (re.escape(pattern).replace(r"\{\}", r"\d+") for pattern in self.ignored)
        return any(re.fullmatch(pattern, name) for pattern in patterns)

    def named(self, names: Iterable[str]) -> Layout:
        """The layout as seen by a model with these tensors: ours, or named as in the files.

        A transformers model may have the names of the files in memory; its tensors then are
        their own parts.
        """
        known = set(names)
        return Layout(
            tuple(
                OnDisk(tensor.name, tensor.shape, (tensor.name,))
                if tensor.name in known and not known.issuperset(tensor.parts)
                else tensor
                for tensor in self.tensors
            ),
            self.ties,
            self.ignored,
        )
