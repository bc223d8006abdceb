"""Models with more rows for a vocabulary than files have, as a padded one has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from megablocks_core.export.families import family_of
from megablocks_core.export.layout import Layout, Rule
from megablocks_core.export.lazies import Shape
from megablocks_core.export.operations import Resize
from megablocks_core.groups import logical_shape, logical_tensors
from megablocks_core.groups.stacks import separate_names

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def part_shapes(model: nn.Module) -> dict[str, Shape]:
    """The whole shape of what files hold under each logical name of a model."""
    shapes: dict[str, Shape] = {}
    for name, tensor, specs in logical_tensors(model, remove_duplicate=True):
        shape = logical_shape(tensor, specs)
        if specs.each is None:
            shapes[name] = shape
        else:
            shapes |= dict.fromkeys(separate_names(name, specs.each, shape[0]), shape[1:])
    return shapes


def padded(layout: Layout, config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> Layout:
    """The layout of a model whose tables of the vocabulary may have more rows than the files'.

    Rows that the files lack are zeros on the way in, and left out on the way out.

    Args:
        layout: As the model sees it (``Layout.named``).
        config: Of the files.
        shapes: Whole shapes of the model's tensors by logical name.

    Raises:
        ValueError: The family is unknown, or the model has fewer rows than the files.
    """
    family = family_of(config)
    if family is None:
        raise ValueError(
            f"model_type={config.get('model_type')!r} must be known to pad a vocabulary"
        )
    dims = {
        weight.name: weight.shape.split().index("vocab")
        for weight in family.weights
        if "vocab" in weight.shape.split()
    }
    rules = tuple(_padded(rule, dims, shapes) for rule in layout.rules)
    return replace(layout, rules=rules)


def with_vocabulary(config: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """A config whose vocabulary has another size.

    Raises:
        ValueError: It is no positive number, or one of the config's tokens is not below it.
    """
    if type(vocab_size) is not int or vocab_size < 1:
        raise ValueError(f"vocab_size={vocab_size!r} must be a positive whole number")
    for name in _TOKENS:
        given = config.get(name)
        tokens = given if isinstance(given, list) else [given]
        if any(isinstance(token, int) and token >= vocab_size for token in tokens):
            raise ValueError(f"vocab_size={vocab_size} must be above {name}={given} of the config")
    return {**config, "vocab_size": vocab_size}


def _padded(rule: Rule, dims: Mapping[str, int], shapes: Mapping[str, Shape]) -> Rule:
    (theirs, shape), *_ = rule.theirs.items()
    if theirs not in dims or rule.ours[0] not in shapes:
        return rule
    dim, ours = dims[theirs], shapes[rule.ours[0]]
    before, after = shape[dim], ours[dim]
    if after < before:
        raise ValueError(
            f"{rule.ours[0]} has {after} rows and must have at least the {before} of the files; "
            "resize_vocab gives it more"
        )
    return rule if after == before else replace(rule, operations=(Resize(before, after, dim),))
