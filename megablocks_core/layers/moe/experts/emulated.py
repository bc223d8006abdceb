"""The experts of a mixture, their products rounded by a recipe, on any device.

Dimensions: E experts, e here, I features, i here, H hidden size, M rows, N places, n rows of all
experts here, R rank of adapters.
"""

from typing import Any

import torch
from torch import Tensor, nn

from megablocks_core.groups import LOCAL, Group, specs_of
from megablocks_core.layers.moe.dispatch import Dispatched
from megablocks_core.layers.moe.experts.adapted import Factors
from megablocks_core.layers.moe.experts.by_products import by_products
from megablocks_core.layers.moe.experts.experts import GroupedExperts
from megablocks_core.layers.moe.experts.projections import Weigh
from megablocks_core.parallel.counter import key_of
from megablocks_core.parallel.recipes.emulated import Emulated, check_cut, columns_of
from megablocks_core.parallel.recipes.emulation import emulated_grouped_linear
from megablocks_core.parallel.recipes.recipe import Recipe
from megablocks_core.parallel.recipes.state import DrawState, state_for

_NAMES = ("gate", "up", "down")


def emulated_experts(
    num_experts: int,
    hidden_size: int,
    ffn_size: int,
    *,
    activation: str = "swiglu",
    bias: bool = False,
    weigh: Weigh = "hidden",
    ep: Group = LOCAL,
    etp: Group = LOCAL,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> "EmulatedExperts":
    """Experts for every ``experts=``, rounded once they have a ``recipe``.

    Without one they are ``GroupedExperts``. Names, marks and initial values are theirs in any
    case.

    Args:
        num_experts: E.
        hidden_size: H.
        ffn_size: I.
        activation: As of ``GroupedExperts``.
        bias: Add biases to all projections.
        weigh: As of ``GroupedExperts``.
        ep: The ranks that share the experts.
        etp: The ranks that share the features of each expert.
        device: Of the parameters.
        dtype: Of the parameters.

    Raises:
        ValueError: As of ``GroupedExperts``.
    """
    return EmulatedExperts(
        num_experts,
        hidden_size,
        ffn_size,
        activation=activation,
        bias=bias,
        weigh=weigh,
        ep=ep,
        etp=etp,
        device=device,
        dtype=dtype,
    )


class EmulatedExperts(Emulated, GroupedExperts):
    """What ``emulated_experts`` builds: ``GroupedExperts`` until there is a recipe.

    Under one, each expert's rows, weights and gradients have scales or blocks of their own, and
    blocks start with its first row, as in Transformer Engine's grouped linear layers. Each
    projection sends the amaxes of all experts here in one message forward and one backward.
    Counts of tokens are read on the host. Adapters stay in the model's own dtype.
    """

    def forward(self, dispatched: Dispatched) -> Tensor:
        """Weighted results of the experts here, a row for each place [N H].

        Raises:
            ValueError: ``x`` has another number of features or, without a recipe, another dtype.
        """
        if self.recipe is None:
            return super().forward(dispatched)
        device = dispatched.x.device.type
        if torch.is_autocast_enabled(device):
            x = dispatched.x.to(torch.get_autocast_dtype(device))
            dispatched = dispatched._replace(x=x)
        adapters = self._adapters()

        def product(name: str, x_nF: Tensor, counts: list[int]) -> Tensor:
            factors = None if adapters is None else getattr(adapters, name)
            return self._product(name, x_nF, counts, factors)

        return by_products(self, dispatched, product)

    def _product(
        self, name: str, x_nF: Tensor, counts: list[int], factors: Factors | None
    ) -> Tensor:
        weight, held = getattr(self, f"{name}_proj"), self._modules.get("fp8")
        assert self.recipe is not None
        y = emulated_grouped_linear(
            x_nF,
            weight,
            counts,
            recipe=self.recipe,
            state=None if held is None else getattr(held, f"{name}_proj"),
            amax_group=self.amax_group,
            columns=columns_of(self._cut(name), weight),
            numbers=range(self.experts.start, self.experts.stop),
        )
        if factors is not None:
            y = y + _adapted(x_nF, counts, factors).to(y.dtype)
        bias = None if name == "down" else getattr(self, f"{name}_bias")
        if bias is None:
            return y
        parts = zip(y.split(counts), bias.to(y.dtype).unbind(), strict=True)
        return torch.cat([rows + own for rows, own in parts])

    def _cut(self, name: str) -> Any:
        """How ``etp`` cuts a projection."""
        return specs_of(self, f"{name}_proj")[1]

    def _own_group(self) -> Group:
        return self.etp

    def _check(self, recipe: Recipe) -> None:
        for name in self._held():
            spec = self._cut(name)
            check_cut(spec, getattr(self, f"{name}_proj").shape[spec.dim], recipe)

    def _new_state(self, recipe: Recipe) -> nn.Module | None:
        states = {
            f"{name}_proj": state_for(
                recipe,
                num_products=len(self.up_proj),
                group=self.ep,
                device=self.up_proj.device,
            )
            for name in self._held()
        }
        kept = {name: state for name, state in states.items() if state is not None}
        return nn.ModuleDict(kept) if kept else None

    def _held(self) -> list[str]:
        return [name for name in _NAMES if getattr(self, f"{name}_proj") is not None]

    def name_draws(self, name: str) -> None:
        """Give what is drawn here keys of its own, by the stack's name in the model."""
        held = self._modules.get("fp8")
        for projection, state in () if held is None else held.named_children():
            if isinstance(state, DrawState):
                state.key.fill_(key_of(0, f"{name}.{projection}"))


def _adapted(x_nF: Tensor, counts: list[int], factors: Factors) -> Tensor:
    """What the adapters of each expert add."""
    parts = zip(x_nF.split(counts), factors.a.unbind(), factors.b.unbind(), strict=True)
    return torch.cat([factors.scale * (rows.to(a.dtype) @ a.t() @ b.t()) for rows, a, b in parts])
