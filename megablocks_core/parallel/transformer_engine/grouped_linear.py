"""Linear layers of many experts, computed by Transformer Engine.

Dimensions: E experts, e here, N rows here, one expert after the other, I input features, O output
features. A lowercase letter is this rank's share of the capital one.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megablocks_core.groups import LOCAL, Group, ShardSpec, mark, specs_of, split_evenly
from megablocks_core.parallel.checks import check_choice
from megablocks_core.parallel.initial import key_for, uniform_
from megablocks_core.parallel.recipes import MXFP8, NVFP4, Recipe
from megablocks_core.parallel.transformer_engine.engine import Engine, refuse_quantised
from megablocks_core.parallel.transformer_engine.low_precision import LowPrecision
from megablocks_core.parallel.transformer_engine.scales import Scales


def grouped_linear(
    num_experts: int,
    in_features: int,
    out_features: int,
    *,
    parallel_mode: Literal["column", "row"] = "column",
    bias: bool = True,
    each: str = "experts.{}",
    ep: Group = LOCAL,
    etp: Group = LOCAL,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> "GroupedLinear":
    """``transformer_engine.pytorch.GroupedLinear``, its weights stacked: ``weight`` [e O I].

    Called ``(x, counts)`` with ``x`` [N I] and the number of rows of each expert here [e], it
    gives ``y`` [N O], or this rank's part of the features or of the sum over ``etp``. It sends
    nothing: dispatchers sum over ``etp``.

    Args:
        num_experts: E, over all ranks.
        in_features: I.
        out_features: O.
        parallel_mode: Which features ``etp`` cuts: "column" output, "row" input features.
        bias: Add biases [e O].
        each: Under which name a checkpoint has one expert's layer, relative to the parent.
        ep: The ranks that share the experts.
        etp: The ranks that share the features of each expert.
        device: Of the parameters.
        dtype: Of the parameters.

    Raises:
        ImportError: Transformer Engine is missing.
        ValueError: A size does not divide evenly over its group, or each rank of ``etp`` would add
            a whole bias to its part of a sum.
    """
    check_choice("parallel_mode", parallel_mode, ("column", "row"))
    if bias and parallel_mode == "row" and etp.size > 1:
        raise ValueError(
            f"bias=True of parts of a sum over etp of {etp.size} ranks must be added once: "
            "set bias=False"
        )
    shape = (num_experts, out_features, in_features)
    return GroupedLinear(shape, parallel_mode, bias, each, ep, etp, device=device, dtype=dtype)


class GroupedLinear(LowPrecision):
    """What ``grouped_linear`` builds."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        shape: tuple[int, int, int],
        parallel_mode: str,
        bias: bool,
        each: str,
        ep: Group,
        etp: Group,
        *,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.num_experts, self.out_features, self.in_features = shape
        self.ep, self.etp = ep, etp
        self.amax_group = etp
        experts = _length(self.num_experts, ep, "num_experts")
        rows, columns = self.out_features, self.in_features
        if parallel_mode == "column":
            rows = _length(rows, etp, "out_features")
        else:
            columns = _length(columns, etp, "in_features")
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(experts, rows, columns, **place))
        self.bias = nn.Parameter(torch.empty(experts, rows, **place)) if bias else None
        cut = ShardSpec(1 if parallel_mode == "column" else 2, etp)
        mark(self, "weight", ShardSpec(0, ep), cut, each=f"{each}.weight", expert=True)
        if bias:
            mark(self, "bias", ShardSpec(0, ep), cut, each=f"{each}.bias", expert=True)
        self.engine = grouped_engine(self.weight, bias=bias)
        self.reset_parameters()

    def reset_parameters(self, seed: int | None = None, prefix: str = "") -> None:
        """Draw each expert's values as ``nn.Linear`` does; one seed is one model at any size."""
        bound = self.in_features**-0.5 if self.in_features else 0.0
        for name, parameter in self.named_parameters(recurse=False):
            key = key_for(parameter, prefix + name, seed)
            uniform_(parameter, key=key, low=-bound, high=bound, specs=specs_of(self, name))

    def forward(self, x_NI: Tensor, counts: Sequence[int]) -> Tensor:
        """``x W^T + b`` with each row's expert.

        Raises:
            ValueError: The counts are not those of the rows and experts here.
        """
        counts = [int(count) for count in counts]
        if len(counts) != len(self.weight) or sum(counts) != len(x_NI):
            raise ValueError(
                f"counts={counts} must be {len(self.weight)} numbers with sum {len(x_NI)}"
            )
        alignment = Alignment(counts, multiple_of(self.recipe), x_NI.device)
        y = self.engine(
            unstacked(self.weight, self.bias),
            alignment.padded(x_NI),
            alignment.counts,
            recipe=self.recipe,
            amax_group=self.amax_group,
            scales=self.scales,
        )
        return alignment.taken(y)

    def _new_scales(self, length: int) -> nn.Module:
        experts, device = len(self.weight), self.weight.device
        return Scales(length, experts, group=self.ep, device=device)

    def extra_repr(self) -> str:
        """The whole sizes and the number of ranks."""
        return (
            f"num_experts={self.num_experts}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.bias is not None}, "
            f"ep={self.ep.size}, etp={self.etp.size}, recipe={self.recipe}"
        )


def grouped_engine(weight: Tensor, *, bias: bool) -> Engine:
    """An engine for stacked weights [e o i]."""
    refuse_quantised("stacked weights of experts")
    experts, rows, columns = weight.shape
    options = {"bias": bias, "params_dtype": weight.dtype}
    return Engine("GroupedLinear", (experts, columns, rows), options, num_products=experts)


def unstacked(weight: Tensor, bias: Tensor | None) -> dict[str, Tensor | None]:
    """Stacked parameters by the names of Transformer Engine's, as views."""
    parts: dict[str, Tensor | None] = {f"weight{i}": part for i, part in enumerate(weight.unbind())}
    if bias is not None:
        parts |= {f"bias{i}": part for i, part in enumerate(bias.unbind())}
    return parts


def multiple_of(recipe: Recipe | None) -> int:
    """What numbers of rows must be multiples of, so that products serve the recipe."""
    if recipe is None:
        return 1
    return {MXFP8: 32, NVFP4: 128}.get(type(recipe), 16)


class Alignment:
    """Rows of experts, each expert's followed by zeros up to a multiple.

    Args:
        counts: Rows of each expert.
        multiple: Of what the padded counts are.
        device: Of the rows.
    """

    def __init__(self, counts: Sequence[int], multiple: int, device: torch.device) -> None:
        self.counts = [-(-count // multiple) * multiple for count in counts]
        self._aligned = list(counts) == self.counts
        if self._aligned:
            return
        total = sum(counts)
        shifts = [
            new - old for new, old in zip(accumulate(self.counts), accumulate(counts), strict=True)
        ]
        before = torch.tensor([0, *shifts[:-1]], device=device)
        lengths = torch.tensor(list(counts), device=device)
        shift = before.repeat_interleave(lengths, output_size=total)
        self._places = torch.arange(total, device=device) + shift

    def padded(self, x_NI: Tensor) -> Tensor:
        """The rows with zeros between."""
        if self._aligned:
            return x_NI
        return x_NI.new_zeros(sum(self.counts), x_NI.shape[1]).index_copy(0, self._places, x_NI)

    def taken(self, y: Tensor) -> Tensor:
        """The rows without what was computed between."""
        return y if self._aligned else y.index_select(0, self._places)


def _length(size: int, group: Group, name: str) -> int:
    part = split_evenly(size, group=group, name=name)
    return part.stop - part.start
