"""Which layers of a model take which recipe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from torch import nn

from megablocks_core.groups import Group, Mesh, specs_of
from megablocks_core.groups.marking import clean_name
from megablocks_core.groups.patterns import matcher
from megablocks_core.parallel.checks import check_mapping, check_module, check_whole
from megablocks_core.parallel.recipes.recipe import Recipe, check_recipe
from megablocks_core.parallel.recipes.transformer_engine import outer_autocast

# Linear layers that choose or weigh experts; their errors move whole tokens.
_ROUTERS = ("gate", "router", "shared_expert_gate")


class Choice(NamedTuple):
    """What a layer does.

    Attributes:
        recipe: Its recipe; ``None``: it computes in the model's own dtype.
        why: The pattern that decided, or the rule that kept the layer.
    """

    recipe: Recipe | None
    why: str


@dataclass(frozen=True)
class Recipes:
    """Patterns of names, each with the recipe of the layers that it matches.

    Layers are linear layers and stacks of experts. A pattern matches a layer or a module around
    it, by the whole name or its last steps (``groups.patterns``: ``*`` is one step, ``**`` any).
    Of several that match, the last one decides; ``None`` takes a layer out again.

    Three kinds stay in the model's dtype. Routers, and what lies outside the blocks of a model
    that has some (embeddings, the head), as long as no pattern ends in their own name, such as
    "lm_head"; norms are never rounded. And the first and last blocks: elements of the outermost
    ``ModuleList``.

    Attributes:
        patterns: Pattern to recipe.
        first_bf16: How many blocks at the start stay as they are, whatever patterns say.
        last_bf16: The same at the end.
    """

    patterns: Mapping[str, Recipe | None]
    first_bf16: int = 1
    last_bf16: int = 1

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ValueError: One is of another kind, or no pattern is given.
        """
        check_mapping("patterns", self.patterns)
        if not self.patterns:
            raise ValueError(f"patterns={self.patterns!r} must hold a pattern")
        for pattern, recipe in self.patterns.items():
            if not isinstance(pattern, str) or not pattern:
                raise ValueError(f"patterns={pattern!r} must be names of layers")
            if recipe is not None:
                check_recipe(f"patterns[{pattern!r}]", recipe)
        # What the caller does to its mapping later changes nothing.
        object.__setattr__(self, "patterns", dict(self.patterns))
        check_whole("first_bf16", self.first_bf16, least=0)
        check_whole("last_bf16", self.last_bf16, least=0)

    def of(self, model: nn.Module) -> dict[str, Choice]:
        """What each layer of ``model`` does, by name and in the model's order.

        Raises:
            ValueError: A pattern decides about no layer: it matches none, or only such as stay.
        """
        check_module(model)
        layers = _layers(model)
        kept = _in_outer_blocks(model, self.first_bf16, self.last_bf16)
        inside = _in_outer_blocks(model, None, None)
        choices = {name: Choice(None, "no pattern") for name in layers}
        met = dict.fromkeys(self.patterns, False)
        for name in layers:
            held = _within(name, kept)
            special = name.rpartition(".")[2] in _ROUTERS or bool(
                inside and not _within(name, inside)
            )
            if held or special:
                choices[name] = Choice(None, held or "kept unless named outright")
        for pattern, recipe in self.patterns.items():
            matches = matcher(pattern, ends=True)
            for name in _named(model, layers, pattern):
                if not any(map(matches, _paths(name))) or _within(name, kept):
                    continue
                stays = choices.get(name, Choice(None, "")).why == "kept unless named outright"
                if stays and not _outright(pattern, name):
                    continue
                met[pattern] = True
                choices[name] = Choice(recipe, pattern)
        if unmet := [pattern for pattern, found in met.items() if not found]:
            raise ValueError(
                f"patterns={unmet} must match layers of {type(model).__name__} that may be "
                f"rounded: not routers, what lies outside the blocks, nor the first "
                f"{self.first_bf16} and last {self.last_bf16} of these"
            )
        return choices

    def apply(self, model: nn.Module, *, mesh: Mesh | None = None) -> dict[str, Choice]:
        """Set ``recipe`` and ``amax_group`` of every layer, in place; nothing if one is refused.

        Dense layers share amaxes over tp x cp x dp, a stack of experts over etp and its copies, so
        that scales are those of one process. Groups are made here: every rank must call this.

        Args:
            model: Its layers are ``recipes.emulated_linear_factory``'s, ``emulated_experts``'s of
                ``layers.moe.experts`` or Transformer Engine's.
            mesh: The groups; without it each layer keeps its ``amax_group``.

        Returns:
            What ``of`` gives.

        Raises:
            ValueError: As of ``of``; or a chosen layer cannot be rounded, or is cut inside blocks,
                or ``mesh`` is none.
        """
        choices, layers = self.of(model), dict(_modules(model))
        plain = [
            f"{name} ({type(layers[name]).__name__})"
            for name, choice in choices.items()
            if choice.recipe is not None and not _serves(layers[name])
        ]
        if plain:
            raise ValueError(
                f"layers {plain} must have a recipe to set: build the model with linear= and "
                "experts= of Transformer Engine, or emulated_linear_factory and emulated_experts"
            )
        chosen = [layers[name] for name, choice in choices.items() if choice.recipe is not None]
        groups = {} if mesh is None else _groups(mesh, with_experts=any(map(_is_expert, chosen)))
        before = {name: layers[name].recipe for name in choices if _serves(layers[name])}
        for name in before:
            try:
                layers[name].recipe = choices[name].recipe  # type: ignore[assignment]
            except (ValueError, ImportError) as error:
                for other, recipe in before.items():
                    layers[other].recipe = recipe  # type: ignore[assignment]
                raise type(error)(f"layer {name!r}: {error}") from error
        for name in before:
            layer: Any = layers[name]
            if groups and choices[name].recipe is not None:
                layer.amax_group = groups[_is_expert(layer)]
            if hasattr(layer, "name_draws"):
                layer.name_draws(name)
        return choices

    def table(self, model: nn.Module) -> str:
        """A line for each layer: its name, what it does, and what decided."""
        lines = [
            (name, "-" if choice.recipe is None else short(choice.recipe), choice.why)
            for name, choice in self.of(model).items()
        ]
        widths = [max(len(line[column]) for line in lines) for column in range(2)]
        return "\n".join(
            f"{name:<{widths[0]}}  {recipe:<{widths[1]}}  {why}" for name, recipe, why in lines
        )


def short(recipe: Recipe) -> str:
    """A recipe as code that makes it, without the fields that have their defaults."""
    given = [
        f"{field.name}={value!r}"
        for field in fields(recipe)
        if (value := getattr(recipe, field.name)) != field.default
    ]
    return f"{type(recipe).__name__}({', '.join(given)})"


def autocast(recipes: Recipes | Recipe | Iterable[Recipe]) -> AbstractContextManager[Any]:
    """Around a forward pass of a model with recipes.

    Transformer Engine's layers under delayed scaling need it: their new scales, and the one
    message for all amaxes, come where it ends. Elsewhere it changes nothing.

    Raises:
        ValueError: It holds something else, or two delayed recipes differ in
            ``amax_algorithm`` alone, which Transformer Engine would not tell apart.
    """
    if isinstance(recipes, Recipes):
        given = [recipe for recipe in recipes.patterns.values() if recipe is not None]
    else:
        given = list(recipes) if isinstance(recipes, Iterable) else [recipes]
    for recipe in given:
        check_recipe("recipes", recipe)
    return outer_autocast(given)


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Logical name and module."""
    for path, part in model.named_modules():
        yield clean_name(f"{path}.").removesuffix("."), part


def _layers(model: nn.Module) -> list[str]:
    """Names of linear layers and of stacks of experts."""
    return [name for name, part in _modules(model) if _serves(part) or _is_layer(part)]


def _groups(mesh: object, *, with_experts: bool) -> dict[bool, Group]:
    """The ranks that share amaxes of dense layers (``False``) and of experts (``True``)."""
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh={mesh!r} must be a Mesh")
    groups = {False: mesh.group("tp", "cp", "dp")}
    if with_experts:
        groups[True] = mesh.expert.group("etp", "edp")
    return groups


def _serves(part: nn.Module) -> bool:
    return hasattr(part, "recipe") and hasattr(part, "amax_group")


def _is_layer(part: nn.Module) -> bool:
    weight = part._parameters.get("weight")
    sizes = (getattr(part, "in_features", None), getattr(part, "out_features", None))
    linear = weight is not None and weight.dim() == 2 and None not in sizes
    return linear or any(specs_of(part, name).each for name in part._parameters)


def _is_expert(part: nn.Module) -> bool:
    return any(specs_of(part, name).expert for name in part._parameters)


def _named(model: nn.Module, layers: list[str], pattern: str) -> list[str]:
    """The layers, and whatever else has parameters and is named outright: it will be refused."""
    others = [
        name
        for name, part in _modules(model)
        if next(part.parameters(recurse=False), None) is not None and _outright(pattern, name)
    ]
    return list(dict.fromkeys([*layers, *others]))


def _outright(pattern: str, name: str) -> bool:
    """Whether the pattern's last step is the module's own name, letter by letter."""
    matches = matcher(pattern, ends=True)
    return pattern.rpartition(".")[2] == name.rpartition(".")[2] and matches(name)


def _paths(name: str) -> Iterator[str]:
    """The name, and those of the modules around it."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _in_outer_blocks(model: nn.Module, first: int | None, last: int | None) -> dict[str, str]:
    """Paths of the first and last elements of the outermost lists, or of all, and what to say."""
    found: dict[str, str] = {}
    lists: list[str] = []
    for path, part in _modules(model):
        if not isinstance(part, nn.ModuleList) or any(_is_below(path, other) for other in lists):
            continue
        lists.append(path)
        for index in range(len(part)):
            place = f"{path}.{index}".lstrip(".")
            if first is None or last is None or index < first:
                found[place] = "one of the first blocks"
            elif index >= len(part) - last:
                found[place] = "one of the last blocks"
    return found


def _is_below(path: str, other: str) -> bool:
    return not other or path.startswith(f"{other}.")


def _within(name: str, blocks: Mapping[str, str]) -> str | None:
    """What is said of the block that ``name`` lies in."""
    return next((blocks[path] for path in _paths(name) if path in blocks), None)
