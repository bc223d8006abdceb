"""What a family of configs of hybrid models is, as data, and what most of them have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megablocks_core.layers.spec.entries import Entries
from megablocks_core.layers.spec.mixer_specs import Mamba1Spec, Mamba2Spec

Values = dict[str, Any]

# Entries of models of any blocks, and their fields; those of most can tie the head's weight.
UNTIED = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "initializer_range": "initializer_range",
}
COMMON = {**UNTIED, "tie_word_embeddings": "tied"}


@dataclass(frozen=True)
class HybridFamily:
    """All configs of one ``model_type``.

    Attributes:
        architecture: Name of the transformers class.
        mamba: The kind of its Mamba blocks, if it has some.
        read_pattern: Takes the entries that tell the blocks, and gives a pattern.
        write_pattern: The inverse.
        fields: For a letter, the entries that there are if the pattern has it, and their fields;
            "" stands for those that there are always.
        defaults: What an absent entry means.
        fixed: Fields that a config has no say in.
        of_experts: Such fields of ``MoESpec``.
        required: Entries that must be these.
        derive: Gives entries that others imply their values, and takes those others.
        expand: The entry that says how much wider Mamba blocks are inside.
        turned: The share of a head's features that are turned by positions; 0 for none.
        asks: Features are turned only if an entry says so.
        any_share: ``turned`` is the share if no entry says another.
    """

    architecture: str
    mamba: type[Mamba1Spec | Mamba2Spec] | None
    read_pattern: Callable[[Entries], str]
    write_pattern: Callable[[str], Values]
    fields: Mapping[str, Mapping[str, str]]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    of_experts: Mapping[str, Any] = field(default_factory=dict)
    required: Mapping[str, Any] = field(default_factory=dict)
    derive: Callable[[Entries], None] = lambda _: None
    expand: str = "expand"
    turned: float = 0.0
    asks: bool = False
    any_share: bool = False

    def used(self, pattern: str) -> dict[str, str]:
        """The entries of a model with these blocks, and their fields."""
        kinds = [table for kind, table in self.fields.items() if kind in pattern]
        return {key: path for table in kinds for key, path in table.items()}

    def every_entry(self) -> set[str]:
        """The entries of models with any blocks."""
        return {key for table in self.fields.values() for key in table}


def check_expand(entries: Entries, expand: str, heads: str, width: str) -> None:
    """Take how much wider blocks are inside, and refuse heads that are not as wide.

    Raises:
        ValueError: As said.
    """
    factor, hidden = entries.take(expand), entries.peek("hidden_size")
    if factor is not None and factor * hidden != entries.peek(heads) * entries.peek(width):
        raise ValueError(
            f"{expand}={factor} times hidden_size={hidden} must be {heads}={entries.peek(heads)} "
            f"times {width}={entries.peek(width)}"
        )
