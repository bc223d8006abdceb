"""What a Hugging Face checkpoint of a family holds: names, shapes and ties, as data.

A weight has its on-disk name ("{}" stands for a layer's number, a second one for an expert's), its
shape in sizes of the config, the config entry without which it is absent, the kind of block that
has it, and our names where those are others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megablocks_core.export.layout import Layout, OnDisk, Shape

Config = Mapping[str, Any]
Sizes = dict[str, int]


@dataclass(frozen=True)
class Weight:
    """One kind of tensor.

    Attributes:
        name: On-disk name; "{}" for the number of a layer, and then for that of an expert.
        shape: Names of sizes.
        when: Config entry that must be true; ``None`` for a weight that is always there.
        ours: Logical name in our models, if another; several, if their rows follow each other on
            disk; with a second "{}" that ``name`` lacks, experts are stacked on disk.
        kind: Letter of the blocks that have it; ``None``: all have it.
        block: Which of our blocks it is of, where a layer is several.
    """

    name: str
    shape: str
    when: str | None = None
    ours: str | tuple[str, ...] | None = None
    kind: str | None = None
    block: int = 0


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

    def layout(self, config: Config) -> Layout:
        """All tensors of a model with ``config``.

        Raises:
            ValueError: The config lacks a size.
        """
        missing = [name for name in self.needed if {**self.defaults, **config}.get(name) is None]
        if missing:
            raise ValueError(f"config must have {missing}")
        config = {**self.defaults, **self.in_others_words(config)}
        known = {name: value for name, value in config.items() if value is not None}
        sizes, kinds = self.sizes(known), self.kinds(known)
        tensors = [
            tensor
            for weight in self.weights
            if weight.when is None or known.get(weight.when)
            for tensor in self._tensors(weight, sizes, kinds)
        ]
        owners = {tensor.parts[0]: tensor.name for tensor in tensors}
        ties = {}
        if known.get("tie_word_embeddings"):
            ties = {name: owners[twin] for name, twin in self.ties.items()}
        kept = tuple(tensor for tensor in tensors if tensor.name not in ties)
        return Layout(kept, ties, self.ignored)

    def _tensors(self, weight: Weight, sizes: Sizes, kinds: Sequence[str]) -> list[OnDisk]:
        """All tensors of one kind."""
        shape = tuple(_size(word, sizes) for word in weight.shape.split())
        if "{}" not in weight.name:
            return [OnDisk(weight.name, shape, _ours(weight))]
        layers = [n for n, held in enumerate(kinds) if weight.kind is None or weight.kind in held]
        apart = weight.name.count("{}") > 1
        found = []
        for layer in layers:
            own = layer * self.blocks + weight.block
            for expert in range(sizes["experts"]) if apart else (0,):
                found.append(_layer_tensor(weight, shape, (layer, expert), own, sizes))
        return found


def _layer_tensor(
    weight: Weight, shape: Shape, numbers: tuple[int, int], own: int, sizes: Sizes
) -> OnDisk:
    """The tensor of one layer, and of one expert if those are apart on disk."""
    ours = _ours(weight)
    stacked = ours[0].count("{}") > weight.name.count("{}")
    experts = range(sizes["experts"]) if stacked else numbers[1:]
    parts = tuple(name.format(own, expert) for expert in experts for name in ours)
    return OnDisk(weight.name.format(*numbers), shape, parts, stacked)


def _ours(weight: Weight) -> tuple[str, ...]:
    ours = weight.name if weight.ours is None else weight.ours
    return (ours,) if isinstance(ours, str) else ours


def _size(word: str, sizes: Sizes) -> int:
    """A number, or the size of a name."""
    return int(word) if word.isdigit() else sizes[word]
