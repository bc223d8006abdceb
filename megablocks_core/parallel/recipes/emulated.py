"""What modules whose products are rounded here have in common: a recipe, and what it keeps."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from megablocks_core.groups import Group, ShardSpec
from megablocks_core.parallel.recipes.recipe import Recipe, check_recipe
from megablocks_core.parallel.recipes.rounding import Columns, block_length
from megablocks_core.parallel.recipes.state import State


class Emulated(nn.Module):
    """A module with a recipe, and the recipe's state as the child ``fp8`` if it has one.

    It stands before the class whose parameters it computes with, which has ``reset_parameters``.
    """

    _recipe: Recipe | None = None
    _amax_group: Group | None = None

    @property
    def recipe(self) -> Recipe | None:
        """How operands are rounded; ``None``: not at all.

        A recipe that differs from the one before starts with a fresh state.

        Raises:
            ValueError: When set: it is no recipe, or the layer is cut inside its blocks.
        """
        return self._recipe

    @recipe.setter
    def recipe(self, recipe: Recipe | None) -> None:
        if recipe is not None:
            check_recipe("recipe", recipe)
            self._check(recipe)
        if recipe != self._recipe:
            self._modules.pop("fp8", None)
            state = None if recipe is None else self._new_state(recipe)
            if state is not None:
                self.fp8 = state
        self._recipe = recipe

    @property
    def amax_group(self) -> Group:
        """The ranks whose shares of input, weight and gradient are one tensor each.

        Default those that share the module.
        """
        return self._own_group() if self._amax_group is None else self._amax_group

    @amax_group.setter
    def amax_group(self, group: Group) -> None:
        self._amax_group = group

    def reset_parameters(self, seed: int | None = None, prefix: str = "") -> None:
        """As the module without a recipe; what the recipe keeps is fresh too."""
        super().reset_parameters(seed, prefix)  # type: ignore[misc]
        held = self._modules.get("fp8")
        for part in () if held is None else held.modules():
            if isinstance(part, State):
                part.reset()

    def extra_repr(self) -> str:
        """What the module without a recipe says, and the recipe."""
        return f"{super().extra_repr()}, recipe={self._recipe}"

    @abstractmethod
    def name_draws(self, name: str) -> None:
        """Give what is drawn here keys of its own, by the module's name in the model."""

    @abstractmethod
    def _own_group(self) -> Group:
        """The ranks that share the module."""

    @abstractmethod
    def _check(self, recipe: Recipe) -> None:
        """Raise if the module cannot serve the recipe."""

    @abstractmethod
    def _new_state(self, recipe: Recipe) -> nn.Module | None:
        """What the module must keep for the recipe."""


def columns_of(spec: ShardSpec, weight: Tensor) -> Columns | None:
    """The numbers of the output features here, if ``spec`` cuts those of a weight [... O I]."""
    if spec.group.size == 1 or spec.dim == weight.dim() - 1:
        return None
    count = spec.whole_length(weight.shape[-2])
    held = [
        torch.arange(part.start, part.stop, device=weight.device) for part in spec.ranges(count)
    ]
    return Columns(torch.cat(held), count)


def check_cut(spec: ShardSpec, held: int, recipe: Recipe) -> None:
    """Raise on every rank if a block of any rank's share would be another one in the whole."""
    length, group = block_length(recipe), spec.group
    if length == 1 or group.size == 1:
        return
    whole = spec.whole_length(held)
    for rank in range(group.size):
        *others, last = spec.ranges(whole, rank)
        ends = [last.start] + [end for part in others for end in (part.start, part.stop)]
        if last.stop != whole:
            ends.append(last.stop)
        if any(end % length for end in ends):
            raise ValueError(
                f"recipe={recipe} has blocks of {length}, which must lie on one rank each: "
                f"the cuts of dimension {spec.dim} over {group.size} ranks are at {ends}"
            )
