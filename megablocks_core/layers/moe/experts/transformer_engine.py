"""The experts of a mixture, whose products Transformer Engine computes.

Dimensions: E experts, e here, I features, i here, H hidden size, M rows, N places.
"""

import torch
from torch import Tensor, nn

from megablocks_core.groups import LOCAL, Group
from megablocks_core.layers.moe.dispatch import Dispatched
from megablocks_core.layers.moe.experts.by_products import by_products
from megablocks_core.layers.moe.experts.experts import GroupedExperts
from megablocks_core.parallel.transformer_engine.grouped_linear import (
    grouped_engine,
    multiple_of,
    unstacked,
)
from megablocks_core.parallel.transformer_engine.low_precision import LowPrecision
from megablocks_core.parallel.transformer_engine.scales import Scales

_NAMES = ("gate", "up", "down")


def grouped_experts(
    num_experts: int,
    hidden_size: int,
    ffn_size: int,
    *,
    activation: str = "swiglu",
    bias: bool = False,
    ep: Group = LOCAL,
    etp: Group = LOCAL,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> "TransformerEngineExperts":
    """Experts for every ``experts=``: ``transformer_engine.pytorch.GroupedLinear`` three times.

    Arguments, names, marks, initial values and results are those of ``GroupedExperts``. Counts of
    tokens are read on the host; under a recipe rows are padded with zeros to the multiples that
    its products need.

    Args:
        num_experts: E.
        hidden_size: H.
        ffn_size: I.
        activation: As of ``GroupedExperts``.
        bias: Add biases to all projections.
        ep: The ranks that share the experts.
        etp: The ranks that share the features of each expert.
        device: Of the parameters.
        dtype: Of the parameters.

    Raises:
        ImportError: Transformer Engine is missing.
        ValueError: As of ``GroupedExperts``.
    """
    return TransformerEngineExperts(
        num_experts,
        hidden_size,
        ffn_size,
        activation=activation,
        bias=bias,
        ep=ep,
        etp=etp,
        device=device,
        dtype=dtype,
    )


class TransformerEngineExperts(GroupedExperts, LowPrecision):
    """What ``grouped_experts`` builds: the parameters of ours under other products."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_size: int,
        *,
        activation: str,
        bias: bool,
        ep: Group,
        etp: Group,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(
            num_experts,
            hidden_size,
            ffn_size,
            activation=activation,
            bias=bias,
            ep=ep,
            etp=etp,
            device=device,
            dtype=dtype,
        )
        self.amax_group = etp
        # The bias of ``down`` is weighted, and comes once over etp: it is added afterwards.
        self.engines = {
            name: grouped_engine(weight, bias=bias and name != "down")
            for name in _NAMES
            if (weight := getattr(self, f"{name}_proj")) is not None
        }

    def forward(self, dispatched: Dispatched) -> Tensor:
        """Weighted results of the experts here, a row for each place [N H].

        Raises:
            ValueError: ``x`` has another number of features, or adapters were added.
        """
        if any(not adapter.merged for adapter in self.stack_adapters.values()):
            raise ValueError("adapters must be merged: Transformer Engine's experts serve none")
        return by_products(self, dispatched, self._product, multiple=multiple_of(self.recipe))

    def _product(self, name: str, x: Tensor, counts: list[int]) -> Tensor:
        engine = self.engines[name]
        bias = getattr(self, f"{name}_bias") if engine.options["bias"] else None
        scales = None if self.scales is None else self.scales[f"{name}_proj"]
        return engine(
            unstacked(getattr(self, f"{name}_proj"), bias),
            x,
            counts,
            recipe=self.recipe,
            amax_group=self.amax_group,
            scales=scales,
        )

    def _new_scales(self, length: int) -> nn.Module:
        held, device = len(self.up_proj), self.up_proj.device
        return nn.ModuleDict(
            {
                f"{name}_proj": Scales(length, held, group=self.ep, device=device)
                for name in self.engines
            }
        )
