"""Column- and row-parallel layers whose products are rounded by a recipe, on any device.

Dimensions: T tokens, I input features, O output features. A lowercase letter is this rank's share
of the capital one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from megablocks_core.groups import (
    LOCAL,
    Group,
    Segment,
    ShardSpec,
    all_gather_to,
    copy_slices_to,
    copy_to,
    reduce_from,
    reduce_scatter_to,
)
from megablocks_core.parallel.checks import check_choice
from megablocks_core.parallel.counter import key_of
from megablocks_core.parallel.recipes.emulation import Engine, emulated_linear
from megablocks_core.parallel.recipes.recipe import Recipe, check_recipe
from megablocks_core.parallel.recipes.rounding import Columns, block_length
from megablocks_core.parallel.recipes.state import DrawState, State, state_for
from megablocks_core.parallel.tensor.adapters import with_adapters
from megablocks_core.parallel.tensor.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    cut_features,
    gather_features,
    require_even_tokens,
)


def emulated_linear_factory(
    in_features: int,
    out_features: int,
    *,
    parallel_mode: Literal["column", "row"],
    bias: bool = True,
    sequence_parallel: bool = False,
    segments: Sequence[Segment] | None = None,
    group: Group = LOCAL,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """A layer for ``linear=`` of decoders and their parts, rounded once it has a ``recipe``.

    Without one it is ``ColumnParallelLinear`` or ``RowParallelLinear``. Names, marks and initial
    values are theirs in any case.

    Raises:
        ValueError: A size does not divide evenly, or there is no such ``parallel_mode``.
    """
    check_choice("parallel_mode", parallel_mode, ("column", "row"))
    kind = {"column": EmulatedColumnLinear, "row": EmulatedRowLinear}[parallel_mode]
    return kind(
        in_features,
        out_features,
        bias=bias,
        sequence_parallel=sequence_parallel,
        segments=segments,
        group=group,
        device=device,
        dtype=dtype,
    )


class EmulatedLinear(nn.Module):
    """What both layers share: a recipe, and its state as the child ``fp8`` if it has one."""

    weight: nn.Parameter
    spec: ShardSpec
    group: Group
    adds_adapters = True  # in the model's own dtype
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
            state = state_for(recipe, device=self.weight.device)
            if state is not None:
                self.fp8 = state
        self._recipe = recipe

    @property
    def amax_group(self) -> Group:
        """The ranks whose shares of input, weight and gradient are one tensor each.

        Default the layer's own group.
        """
        return self.group if self._amax_group is None else self._amax_group

    @amax_group.setter
    def amax_group(self, group: Group) -> None:
        self._amax_group = group

    def reset_parameters(self, seed: int | None = None, prefix: str = "") -> None:
        """As the layer without a recipe; what the recipe keeps is fresh too."""
        super().reset_parameters(seed, prefix)  # type: ignore[misc]
        if self._state is not None:
            self._state.reset()

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        assert self._recipe is not None
        return emulated_linear(
            x,
            weight,
            recipe=self._recipe,
            state=self._state,
            amax_group=self.amax_group,
            columns=self._columns(),
            engine=self._engine(),
        )

    def _check(self, recipe: Recipe) -> None:
        _check_cut(self.spec, self.weight.shape[self.spec.dim], recipe)

    def _engine(self) -> Engine | None:
        """What computes the products, if not plain ones."""
        return None

    def name_draws(self, name: str) -> None:
        """Give what is drawn here a key of its own, by the layer's name in the model."""
        if isinstance(self._state, DrawState):
            self._state.key.fill_(key_of(0, name))

    @property
    def _state(self) -> State | None:
        return self._modules.get("fp8")  # type: ignore[return-value]

    def _columns(self) -> Columns | None:
        """The numbers of the output features here."""
        if self.group.size == 1 or self.spec.dim == 1:
            return None
        count = self.spec.whole_length(self.weight.shape[0])
        device = self.weight.device
        held = [
            torch.arange(part.start, part.stop, device=device) for part in self.spec.ranges(count)
        ]
        return Columns(torch.cat(held), count)

    def extra_repr(self) -> str:
        """What the layer without a recipe says, and the recipe."""
        return f"{super().extra_repr()}, recipe={self._recipe}"


class EmulatedColumnLinear(EmulatedLinear, ColumnParallelLinear):
    """``ColumnParallelLinear`` with rounded products, once it has a ``recipe``.

    Under a recipe backward's all-reduce, or reduce-scatter, follows the weight's gradient. Slices
    that neighbours hold too are rounded with each rank's part of the gradient.
    """

    def forward(self, x_TI: Tensor) -> Tensor:
        """``x W^T + b``: this rank's features, or all if gathered."""
        if self._recipe is None:
            return super().forward(x_TI)
        group = self.group
        cut = self.sequence_parallel and group.size > 1
        if cut:
            sizes = [x_TI.shape[-2]] * group.size
            whole_TI = all_gather_to(x_TI, dim=-2, group=group, sizes=sizes)
        else:
            whole_TI = copy_to(x_TI, group=group)
        weight, bias = self._own_copies()
        y_To = self._product(whole_TI, weight)
        if bias is not None:
            y_To = y_To + bias.to(y_To.dtype)
        (y_To,) = with_adapters(
            [y_To],
            x_TI if cut else whole_TI,
            [self.adapter],
            tokens_over=group if cut else LOCAL,
        )
        return gather_features(y_To, self.spec) if self.gather_output else y_To

    def _own_copies(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias; slices that neighbours hold too sum their gradients."""
        if not self.spec.has_copies:
            return self.weight, self.bias
        held = [self.weight] if self.bias is None else [self.weight, self.bias]
        weight, *bias = copy_slices_to(*held, specs=[self.spec] * len(held))
        return weight, bias[0] if bias else None


class EmulatedRowLinear(EmulatedLinear, RowParallelLinear):
    """``RowParallelLinear`` with rounded products, once it has a ``recipe``."""

    def forward(self, x_Ti: Tensor) -> Tensor:
        """``x W^T + b``: whole, or this rank's tokens of it."""
        if self._recipe is None:
            return super().forward(x_Ti)
        group, bias = self.group, self.bias
        if group.size > 1 and not self.input_is_parallel:
            x_Ti = cut_features(x_Ti, self.spec)
        y_TO = self._product(x_Ti, self.weight)
        if self.adapter is not None:
            y_TO = self.adapter.add(y_TO, x_Ti)
        if group.size > 1 and self.sequence_parallel:
            require_even_tokens(x_Ti, group)
            y_TO = reduce_scatter_to(y_TO, dim=-2, group=group)
            bias = None if bias is None else copy_to(bias, group=group)
        else:
            y_TO = reduce_from(y_TO, group=group)
        return y_TO if bias is None else y_TO + bias.to(y_TO.dtype)


def _check_cut(spec: ShardSpec, held: int, recipe: Recipe) -> None:
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
