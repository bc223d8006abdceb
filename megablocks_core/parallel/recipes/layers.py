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
from megablocks_core.parallel.recipes.emulated import Emulated, check_cut, columns_of
from megablocks_core.parallel.recipes.emulation import Engine, emulated_linear
from megablocks_core.parallel.recipes.recipe import Recipe
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


class EmulatedLinear(Emulated):
    """What both layers share."""

    weight: nn.Parameter
    spec: ShardSpec
    group: Group
    adds_adapters = True  # in the model's own dtype

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        assert self.recipe is not None
        return emulated_linear(
            x,
            weight,
            recipe=self.recipe,
            state=self._state,
            amax_group=self.amax_group,
            columns=columns_of(self.spec, self.weight),
            engine=self._engine(),
        )

    def _own_group(self) -> Group:
        return self.group

    def _check(self, recipe: Recipe) -> None:
        check_cut(self.spec, self.weight.shape[self.spec.dim], recipe)

    def _new_state(self, recipe: Recipe) -> State | None:
        return state_for(recipe, device=self.weight.device)

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


class EmulatedColumnLinear(EmulatedLinear, ColumnParallelLinear):
    """``ColumnParallelLinear`` with rounded products, once it has a ``recipe``.

    Under a recipe backward's all-reduce, or reduce-scatter, follows the weight's gradient. Slices
    that neighbours hold too are rounded with each rank's part of the gradient.
    """

    def forward(self, x_TI: Tensor) -> Tensor:
        """``x W^T + b``: this rank's features, or all if gathered."""
        if self.recipe is None:
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
        if self.recipe is None:
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
