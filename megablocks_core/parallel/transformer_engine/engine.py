"""Modules of Transformer Engine that compute with parameters that others own."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megablocks_core.groups import LOCAL, Group
from megablocks_core.parallel.optional import imported
from megablocks_core.parallel.recipes import DelayedScaling, Recipe
from megablocks_core.parallel.recipes.transformer_engine import to_transformer_engine
from megablocks_core.parallel.transformer_engine.scales import Scales

_PACKAGE = "transformer_engine.pytorch"


class Engine:
    """A module of Transformer Engine that is handed its parameters at each call.

    It is built on ``meta``, and holds nothing between calls but scales that it shares with
    ``Scales``. Copies and pickles leave it out and build it again when they are first used.

    Args:
        kind: Its class in ``transformer_engine.pytorch``.
        sizes: Its first arguments.
        options: Its other arguments.
        group: What it takes as ``tp_group``.
        num_products: Of the tensors with scales.

    Raises:
        ImportError: Transformer Engine is missing.
    """

    def __init__(
        self,
        kind: str,
        sizes: tuple[int, ...],
        options: Mapping[str, Any],
        *,
        group: Group = LOCAL,
        num_products: int = 1,
    ) -> None:
        self.kind, self.sizes, self.options = kind, sizes, dict(options)
        self.group, self.num_products = group, num_products
        self._module: nn.Module | None = None
        self.module()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_module": None}

    def module(self) -> Any:
        """Transformer Engine's own."""
        module = self._module
        if module is None:
            build = imported(_PACKAGE, self.kind, extra="te")
            over = {"tp_group": self.group.pg} if self.group.size > 1 else {}
            module = self._module = build(*self.sizes, **self.options, **over, device="meta")
        return module

    def __call__(
        self,
        parameters: Mapping[str, Tensor | None],
        *inputs: Any,
        recipe: Recipe | None = None,
        amax_group: Group = LOCAL,
        scales: Scales | None = None,
    ) -> Tensor:
        """What the module makes of the inputs with these parameters, in the recipe's numbers.

        Raises:
            ValueError: Delayed scaling outside of a context that ends with its update.
        """
        module = self.module()
        with _numbers(recipe, amax_group), _handed(module, parameters):
            if scales is not None:
                module.init_fp8_metadata(self.num_products)
                scales.share_with(module.fp8_meta)
            return module(*inputs)

    def quantised(self, weight: nn.Parameter) -> nn.Parameter:
        """The weight in the numbers of the context that is open, if modules are born in such."""
        manager = imported(f"{_PACKAGE}.quantization", "FP8GlobalStateManager", extra="te")
        if not manager.with_fp8_parameters():
            return weight
        if weight.is_meta:
            raise ValueError(
                "device='meta' must be a real device where weights are held in the numbers of a "
                "recipe alone: their values are rounded when a layer is built"
            )

        @torch.no_grad()
        def take(value: Tensor) -> None:
            value.copy_(weight)

        build = imported(_PACKAGE, self.kind, extra="te")
        place = {"init_method": take, "device": weight.device}
        over = {"tp_group": self.group.pg} if self.group.size > 1 else {}
        return build(*self.sizes, **self.options, **over, **place).weight


@torch.no_grad()
def fill(parameter: nn.Parameter, draw: Callable[[Tensor], Tensor]) -> None:
    """Draw values into a parameter; into one of low precision by way of a wide tensor."""
    if not hasattr(parameter, "_quantizer"):
        draw(parameter)
        return
    place = {"dtype": parameter.dtype, "device": parameter.device}
    parameter.copy_(draw(torch.empty(parameter.shape, **place)))


def refuse_quantised(what: str) -> None:
    """Raise where modules are born with weights of low precision, which ``what`` cannot hold."""
    manager = imported(f"{_PACKAGE}.quantization", "FP8GlobalStateManager", extra="te")
    if manager.with_fp8_parameters():
        raise ValueError(f"{what} cannot hold weights in the numbers of a recipe alone")


def _numbers(recipe: Recipe | None, amax_group: Group) -> AbstractContextManager[Any]:
    """Transformer Engine's context for one call."""
    manager = imported(f"{_PACKAGE}.quantization", "FP8GlobalStateManager", extra="te")
    inside = manager.is_fp8_enabled()
    autocast = imported(_PACKAGE, "autocast", extra="te")
    if recipe is None:
        return autocast(enabled=False) if inside else nullcontext()
    if isinstance(recipe, DelayedScaling):
        if torch.is_grad_enabled() and not inside:
            raise ValueError(
                f"recipe={recipe} must run within autocast of parallel.recipes, at whose end "
                "the scales of the next step are made"
            )
        if amax_group.size == 1:
            # To Transformer Engine no group means all ranks of the world.
            recipe = replace(recipe, reduce_amax=False)
    group = amax_group.pg if amax_group.size > 1 else None
    theirs = to_transformer_engine(recipe)
    context = autocast(enabled=True, recipe=theirs, amax_reduction_group=group)
    return _first_once(manager, context) if inside else context


@contextmanager
def _first_once(manager: Any, context: AbstractContextManager[Any]) -> Iterator[None]:
    """A context in another, after which no second module takes itself for the step's first.

    In backward the first module reduces the amaxes of all and moves their histories on. Where a
    context ends, Transformer Engine puts back what held before it, that no module had run too.
    """
    with context:
        try:
            yield
        finally:
            nobody_ran = manager.quantization_state.is_first_fp8_module
    manager.quantization_state.is_first_fp8_module = nobody_ran


@contextmanager
def _handed(module: nn.Module, parameters: Mapping[str, Tensor | None]) -> Iterator[None]:
    """The module has these parameters inside, and its own of ``meta`` afterwards."""
    own = dict(module._parameters)
    held: dict[str, Any] = module._parameters
    held.update(parameters)
    _place_empty(module, parameters)
    try:
        yield
    finally:
        held.update(own)


def _place_empty(module: nn.Module, parameters: Mapping[str, Tensor | None]) -> None:
    """Stand-ins for absent biases lie where the parameters do."""
    given = next((tensor for tensor in parameters.values() if tensor is not None), None)
    for name, value in list(vars(module).items()):
        if given is not None and isinstance(value, Tensor) and value.device != given.device:
            vars(module)[name] = torch.empty(0, dtype=value.dtype, device=given.device)
