"""The experts of a mixture, whose products Transformer Engine computes.

Dimensions: E experts, e here, I features, i here, H hidden size, M rows, N places.
"""

import torch
from torch import Tensor, nn

from megablocks_core.groups import LOCAL, Group
from megablocks_core.layers.moe.dispatch import Dispatched
from megablocks_core.layers.moe.experts.experts import GroupedExperts
from megablocks_core.layers.moe.experts.places import host_counts, starts_of
from megablocks_core.parallel.transformer_engine.grouped_linear import (
    Alignment,
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
        x_MH, width = dispatched.x, self.hidden_size
        if x_MH.shape[-1] != width:
            raise ValueError(f"x of shape {list(x_MH.shape)} must be [M {width}]")
        if any(not adapter.merged for adapter in self.stack_adapters.values()):
            raise ValueError("adapters must be merged: Transformer Engine's experts serve none")
        counts = host_counts(dispatched)
        filled_n = _filled(dispatched, counts)
        aligned = Alignment(counts, multiple_of(self.recipe), x_MH.device)
        x_nH = aligned.padded(x_MH[dispatched.rows[filled_n]])
        gate_nI = self._product("gate", x_nH, aligned) if self.gate_proj is not None else None
        h_nI = self.formula.activation.forward(gate_nI, self._product("up", x_nH, aligned))
        weights_n1 = dispatched.weights[filled_n].unsqueeze(-1)
        h_nI = (h_nI * aligned.padded(weights_n1)).to(h_nI.dtype)
        y_nH = aligned.taken(self._product("down", h_nI, aligned))
        down_bias_EH = self._projections().down_bias
        if down_bias_EH is not None:
            experts_n = torch.repeat_interleave(
                torch.tensor(counts, device=x_MH.device), output_size=len(filled_n)
            )
            y_nH = y_nH + (weights_n1 * down_bias_EH[experts_n]).to(y_nH.dtype)
        y_NH = y_nH.new_zeros(len(dispatched.rows), width)
        return y_NH.index_copy(0, filled_n, y_nH)

    def _product(self, name: str, x: Tensor, aligned: Alignment) -> Tensor:
        engine = self.engines[name]
        bias = getattr(self, f"{name}_bias") if engine.options["bias"] else None
        scales = None if self.scales is None else self.scales[f"{name}_proj"]
        return engine(
            unstacked(getattr(self, f"{name}_proj"), bias),
            x,
            aligned.counts,
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


def _filled(dispatched: Dispatched, counts: list[int]) -> Tensor:
    """The places that are not empty, in order [n]."""
    device = dispatched.rows.device
    if dispatched.capacity is None:
        return torch.arange(sum(counts), device=device)
    held = torch.tensor(counts, device=device)
    first = torch.tensor(starts_of(dispatched, counts), device=device)
    shift = (first - held.cumsum(0) + held).repeat_interleave(held, output_size=sum(counts))
    return torch.arange(sum(counts), device=device) + shift
