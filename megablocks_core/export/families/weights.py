"""What a Hugging Face checkpoint of a family holds: names, shapes and ties, as data.

A weight has its on-disk name ("{}" stands for a layer's number, a second one for an expert's), its
shape in sizes of the config, the config entry without which it is absent, the kind of block that
has it, our names where those are others, and the operations that lead from its tensor to ours.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megablocks_core.export.layout import Layout, Rule
from megablocks_core.export.operations import Join, Operation, Split, Transpose, Unstack, inverses

Config = Mapping[str, Any]
Sizes = dict[str, int]
# Entries that say how often something comes; there is no model with so many.
_COUNTS = (
    "num_hidden_layers",
    "n_layer",
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "num_nextn_predict_layers",
)
_MANY = 100_000
# Of elements: torch counts bytes in 63 bits.
_LARGEST = 2**59
# What arithmetic raises of entries that are no numbers, or not of a size that can be.
_MISTYPED = (TypeError, AttributeError, LookupError, ArithmeticError, MemoryError)
# An operation whose sizes are named.
Step = Callable[[Sizes], Operation]


def split(sizes: str, *, dim: int = 0, groups: str = "1") -> Step:
    """``Split`` of sizes that are named, or numbers."""
    return lambda known: Split(_shape(sizes, known), dim, _size(groups, known))


def join(sizes: str, *, dim: int = 0, groups: str = "1") -> Step:
    """``Join`` of sizes that are named, or numbers."""
    return lambda known: Join(_shape(sizes, known), dim, _size(groups, known))


def unstack(count: str = "experts") -> Step:
    """``Unstack`` of a named size."""
    return lambda known: Unstack(_size(count, known))


def transpose(dim: int = 0, other: int = 1) -> Step:
    """``Transpose``, which has no sizes."""
    return lambda _: Transpose(dim, other)


@dataclass(frozen=True)
class Weight:
    """One kind of tensor.

    Attributes:
        name: On-disk name; "{}" for the number of a layer, and then for that of an expert.
        shape: Names of sizes.
        when: Config entry that must be true, or after "not " must not be; several are joined by
            " and ". ``None`` for a weight that is always there.
        ours: Logical names in our models, if others, in the order in which ``steps`` give them; a
            second "{}" that ``name`` lacks stands for all experts, one behind the other.
        kind: Letter of the blocks that have it; ``None``: all have it.
        block: Which of our blocks it is of, where a layer is several.
        steps: Lead from the tensor on disk to ours.
        others: Names and shapes of further tensors on disk from which ``steps`` start.
    """

    name: str
    shape: str
    when: str | None = None
    ours: str | tuple[str, ...] | None = None
    kind: str | None = None
    block: int = 0
    steps: tuple[Step, ...] = ()
    others: tuple[tuple[str, str], ...] = ()


def _as_it_is(config: Config) -> Config:
    return config


@dataclass(frozen=True)
class Family:
    """All models of one ``model_type``.

    Attributes:
        architecture: Name of the transformers class.
        weights: Its tensors.
        sizes: The sizes that shapes name, of a config whose defaults are filled in.
        kinds: The kinds of each layer's blocks.
        needed: Entries that a config must have.
        defaults: What an absent config entry means in this family.
        ties: Name of a tensor that is left out when ``tie_word_embeddings``, and our name of the
            one that it equals.
        ignored: Names of tables that old checkpoints hold and nobody reads.
        blocks: How many of our blocks a layer is.
        in_others_words: A config in the words that sizes, kinds and defaults know.
        pickled: Its authors publish pickles.
        prefix: Before all names but those of ``ties``; old files may lack it.
        in_memory: What transformers' modules hold in other tensors than files: ``name`` as in
            memory, ``ours`` on-disk names.
        beside: What files hold beside a language model, of which "beside" is the size of layers.
        predictors: Names of what layers behind the last hold, which predict later tokens; nobody
            reads them. ``num_nextn_predict_layers`` says how many there are.
    """

    architecture: str
    weights: tuple[Weight, ...]
    sizes: Callable[[Config], Sizes]
    kinds: Callable[[Config], Sequence[str]]
    needed: tuple[str, ...]
    defaults: Config = field(default_factory=dict)
    ties: Mapping[str, str] = field(
        default_factory=lambda: {"lm_head.weight": "model.embed_tokens.weight"}
    )
    ignored: tuple[str, ...] = ()
    blocks: int = 1
    in_others_words: Callable[[Config], Config] = _as_it_is
    pickled: bool = False
    prefix: str = ""
    in_memory: tuple[Weight, ...] = ()
    beside: tuple[Weight, ...] = ()
    predictors: tuple[str, ...] = ()

    def prefixed(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors by the names of the table, though the files' names may lack the prefix."""
        if any(name.startswith(self.prefix) for name in tensors):
            return dict(tensors)
        return {
            name if name in self.ties else self.prefix + name: tensor
            for name, tensor in tensors.items()
        }

    def layout(self, config: Config) -> Layout:
        """All tensors of a model with ``config``.

        Raises:
            ValueError: The config lacks a size, or has one that cannot be.
        """
        missing = [name for name in self.needed if {**self.defaults, **config}.get(name) is None]
        if missing:
            raise ValueError(f"config must have {missing}")
        try:
            _check_counts(config)
            layout = self._layout(config)
        except _MISTYPED as error:
            raise ValueError(
                f"config has an entry of a wrong type or size: {type(error).__name__}: {error}"
            ) from error
        for name, shape in layout.schema.items():
            if not all(type(size) is int and size >= 0 for size in shape):
                raise ValueError(f"config must have sizes that are whole numbers: {name} {shape}")
            if math.prod(shape) > _LARGEST:
                raise ValueError(f"config must have sizes that can be: {name} {shape}")
        return layout

    def _layout(self, config: Config) -> Layout:
        config = {**self.defaults, **self.in_others_words(config)}
        known = {name: value for name, value in config.items() if value is not None}
        _check_counts(known)
        sizes, kinds = self.sizes(known), self.kinds(known)
        rules = _table(self.weights, known, sizes, kinds, self.blocks)
        owners = {rule.ours[0]: name for rule in rules for name in rule.theirs}
        ties = {}
        if known.get("tie_word_embeddings"):
            ties = {name: owners[twin] for name, twin in self.ties.items()}
        kept = [rule for rule in rules if ties.keys().isdisjoint(rule.theirs)]
        in_memory = [
            Rule(rule.shapes, tuple(rule.theirs), inverses(rule.operations))
            for rule in _table(self.in_memory, known, sizes, kinds, 1)
        ]
        beside = _table(self.beside, known, sizes, [""] * sizes.get("beside", 0), 1)
        return Layout(
            tuple(_by_layer(kept)),
            ties,
            (*self.ignored, *self._predictors(known, len(kinds))),
            tuple(in_memory),
            tuple(_by_layer(beside)),
        )

    def _predictors(self, config: Config, layers: int) -> list[str]:
        """``predictors`` with the numbers of layers; "{}" is left for those of experts."""
        count = config.get("num_nextn_predict_layers", 0) if self.predictors else 0
        numbers = range(layers, layers + count)
        return [name.format(number, "{}") for number in numbers for name in self.predictors]


def _check_counts(config: Config) -> None:
    for name in _COUNTS:
        count = config.get(name)
        if count is not None and not (type(count) is int and 0 <= count <= _MANY):
            raise ValueError(f"{name}={count!r} must be a whole number from 0 to {_MANY}")


def _table(
    weights: Sequence[Weight], config: Config, sizes: Sizes, kinds: Sequence[str], blocks: int
) -> list[Rule]:
    """The rules of those weights that a config asks for; a layer is so many of our blocks."""
    return [
        rule
        for weight in weights
        if _asked(weight.when, config)
        for rule in _rules(weight, sizes, kinds, blocks)
    ]


def _asked(when: str | None, config: Config) -> bool:
    entries = when.split(" and ") if when else ()
    return all(
        bool(config.get(entry.removeprefix("not "))) != entry.startswith("not ")
        for entry in entries
    )


def _rules(weight: Weight, sizes: Sizes, kinds: Sequence[str], blocks: int) -> list[Rule]:
    """One for each layer, and each expert, that has the weight."""
    theirs = {
        name: _shape(shape, sizes) for name, shape in ((weight.name, weight.shape), *weight.others)
    }
    operations = tuple(step(sizes) for step in weight.steps)
    numbers = weight.name.count("{}")
    if not numbers:
        return [Rule(theirs, _ours(weight), operations)]
    experts = range(sizes["experts"]) if numbers > 1 else (0,)
    return [
        Rule(
            {name.format(layer, expert): shape for name, shape in theirs.items()},
            _numbered(weight, layer * blocks + weight.block, expert, sizes),
            operations,
        )
        for layer, held in enumerate(kinds)
        if weight.kind is None or weight.kind in held
        for expert in experts
    ]


def _by_layer(rules: Sequence[Rule]) -> list[Rule]:
    """One layer behind the other; what stands before the layers, or behind, stays there."""
    places, after = [], False
    for rule in rules:
        number = re.search(r"(?:^|\.)(\d+)\.", next(iter(rule.theirs)))
        after = after or number is not None
        places.append(int(number[1]) if number else math.inf if after else -1)
    return [rules[index] for index in sorted(range(len(rules)), key=places.__getitem__)]


def _numbered(weight: Weight, block: int, expert: int, sizes: Sizes) -> tuple[str, ...]:
    """Our names of the weight of one block, and of one expert or of all."""
    numbers = weight.name.count("{}")
    return tuple(
        name.format(block, one)
        for name in _ours(weight)
        for one in (range(sizes["experts"]) if name.count("{}") > numbers else (expert,))
    )


def _ours(weight: Weight) -> tuple[str, ...]:
    ours = weight.name if weight.ours is None else weight.ours
    return (ours,) if isinstance(ours, str) else ours


def _shape(words: str, sizes: Sizes) -> tuple[int, ...]:
    return tuple(_size(word, sizes) for word in words.split())


def _size(word: str, sizes: Sizes) -> int:
    """A number, or the size of a name."""
    return int(word) if word.isdigit() else sizes[word]
