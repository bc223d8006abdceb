"""Which tensors the files of a model hold, and which of our logical tensors they are made of.

No process group and no file is touched here: who holds which slice is said by marks alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from megablocks_core.export.lazies import Lazy, Shape, outline, shape_of
from megablocks_core.export.operations import Operation, apply, inverses

Shapes = dict[str, Shape]


@dataclass(frozen=True)
class Rule:
    """Tensors of files, and ours, that are made of each other; most often one and one.

    Attributes:
        theirs: On-disk names, and whole shapes.
        ours: Logical names.
        operations: Lead from theirs to ours; their inverses lead back.
    """

    theirs: Mapping[str, Shape]
    ours: tuple[str, ...]
    operations: tuple[Operation, ...] = ()

    @cached_property
    def shapes(self) -> Shapes:
        """Logical name and whole shape of each of ours."""
        outlines = [outline(shape) for shape in self.theirs.values()]
        return {name: shape_of(one) for name, one in self.to_ours(outlines).items()}

    def to_ours(self, theirs: Sequence[Lazy]) -> dict[str, Lazy]:
        """Ours by name, from theirs in the order of ``theirs``."""
        return dict(zip(self.ours, apply(self.operations, theirs), strict=True))

    def to_theirs(self, ours: Sequence[Lazy]) -> dict[str, Lazy]:
        """Theirs by name, from ours in the order of ``ours``."""
        made = apply(inverses(self.operations), ours)
        return dict(zip(self.theirs, made, strict=True))


@dataclass(frozen=True)
class Layout:
    """All tensors of a model's files.

    Attributes:
        rules: In the order of the model.
        ties: On-disk name of a tensor that is left out, and of the one that it equals.
        ignored: Names of tables that old files hold and nobody reads, "{}" for a number.
        in_memory: Rules of transformers' modules whose tensors are not those of the files.
        beside: Rules of what files hold beside a language model, such as a vision tower. A model
            without these tensors is filled all the same; files need them.
    """

    rules: tuple[Rule, ...]
    ties: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    in_memory: tuple[Rule, ...] = ()
    beside: tuple[Rule, ...] = ()

    @property
    def all_rules(self) -> tuple[Rule, ...]:
        """Of the language model and of what is beside it."""
        return (*self.rules, *self.beside)

    @property
    def schema(self) -> Shapes:
        """On-disk name and whole shape of every tensor."""
        return {name: shape for rule in self.all_rules for name, shape in rule.theirs.items()}

    @property
    def order(self) -> list[str]:
        """The logical names, in the order in which files hold what is made of them."""
        return [name for rule in self.all_rules for name in rule.ours]

    @property
    def tied_parts(self) -> dict[str, str]:
        """``ties`` by logical names; what is left out has one name on either side."""
        parts = {name: rule.ours[0] for rule in self.rules for name in rule.theirs}
        return {name: parts[twin] for name, twin in self.ties.items()}

    def ignores(self, name: str) -> bool:
        """Whether an on-disk tensor is one that nobody reads."""
        return self._ignored.fullmatch(name) is not None

    @cached_property
    def _ignored(self) -> re.Pattern[str]:
        patterns = (re.escape(pattern).replace(r"\{\}", r"\d+") for pattern in self.ignored)
        return re.compile("|".join(patterns) or "(?!)")

    def named(self, names: Iterable[str]) -> Layout:
        """The layout as seen by a model with these logical tensors.

        They are ours, or those of a transformers model: named as in the files, or as
        ``in_memory`` says.
        """
        known = set(names)
        used = [rule for rule in self.in_memory if known.issuperset(rule.ours)]
        served = {name for rule in used for name in rule.theirs}
        first = {next(iter(rule.theirs)): rule for rule in used}
        rules: list[Rule] = []
        for rule in self.rules:
            if served.issuperset(rule.theirs):
                rules += [first[name] for name in rule.theirs if name in first]
            elif known.issuperset(rule.ours) or known.isdisjoint(rule.theirs):
                rules.append(rule)
            else:
                rules += [Rule({name: shape}, (name,)) for name, shape in rule.theirs.items()]
        beside = self.beside
        if not known.isdisjoint(name for rule in beside for name in rule.ours):
            rules, beside = [*rules, *beside], ()
        return Layout(tuple(rules), self.ties, self.ignored, self.in_memory, beside)
