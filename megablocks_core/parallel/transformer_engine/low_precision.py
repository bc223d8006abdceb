"""What modules with products in low precision have in common."""

from abc import abstractmethod
from typing import Any

from torch import nn

from megablocks_core.groups import LOCAL, Group
from megablocks_core.parallel.recipes import DelayedScaling, Recipe
from megablocks_core.parallel.recipes.recipe import check_recipe


class LowPrecision(nn.Module):
    """A module that has a recipe, and under delayed scaling buffers of scales, ``fp8``.

    Attributes:
        amax_group: The ranks with the same scales. At first those that share the module; it
            should hold those with copies of it too, as ``Recipes.apply`` sets it.
    """

    amax_group: Group

    def __init__(self) -> None:
        super().__init__()
        self.amax_group = LOCAL
        self._recipe: Recipe | None = None

    @property
    def recipe(self) -> Recipe | None:
        """How operands are rounded; ``None``: not at all.

        Setting one with delayed scaling starts its scales, unless there are such of that length.

        Raises:
            ValueError: What is set is no recipe.
        """
        return self._recipe

    @recipe.setter
    def recipe(self, recipe: Recipe | None) -> None:
        if recipe is not None:
            check_recipe("recipe", recipe)
        before, self._recipe = self._recipe, recipe
        length = _history_of(recipe)
        if length is None:
            # A name without a module would let unread scales of a state pass.
            self._modules.pop("fp8", None)
        elif length != _history_of(before):
            self.fp8 = self._new_scales(length)

    @property
    def scales(self) -> Any:
        """``fp8``, if there is one."""
        return self._modules.get("fp8")

    @abstractmethod
    def _new_scales(self, length: int) -> nn.Module:
        """Scales with a history of so many steps."""


def _history_of(recipe: Recipe | None) -> int | None:
    return recipe.amax_history_len if isinstance(recipe, DelayedScaling) else None
