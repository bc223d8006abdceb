"""Column- and row-parallel linear layers computed by Transformer Engine.

Dimensions: T tokens, I input features, O output features. A lowercase letter is this rank's share
of the capital one.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from megablocks_core.groups import (
    LOCAL,
    Group,
    Segment,
    copy_slices_to,
    copy_to,
    mark,
    specs_of,
)
from megablocks_core.parallel.checks import check_choice
from megablocks_core.parallel.initial import key_for, uniform_
from megablocks_core.parallel.recipes import DelayedScaling
from megablocks_core.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from megablocks_core.parallel.transformer_engine.engine import Engine, fill
from megablocks_core.parallel.transformer_engine.low_precision import LowPrecision
from megablocks_core.parallel.transformer_engine.scales import Scales


def linear(
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
) -> "Linear":
    """A linear layer for every ``linear=``: ``transformer_engine.pytorch.Linear`` as ours is used.

    Arguments, names, marks, initial values, messages and results are those of
    ``ColumnParallelLinear`` and ``RowParallelLinear``; nothing is left to do after backward.

    Args:
        in_features: I.
        out_features: O.
        parallel_mode: "column" cuts output features, "row" input features.
        bias: Add a bias.
        sequence_parallel: The ranks hold equal slices of the tokens, along dim -2.
        segments: Packed parts of the cut features.
        group: The tensor-parallel ranks.
        device: Of the parameters.
        dtype: Of the parameters.

    Raises:
        ImportError: Transformer Engine is missing.
        ValueError: A size does not divide evenly, or ``segments`` do not add up.
    """
    return Linear(
        in_features,
        out_features,
        parallel_mode=parallel_mode,
        bias=bias,
        sequence_parallel=sequence_parallel,
        segments=segments,
        group=group,
        device=device,
        dtype=dtype,
    )


class ParallelLinear(LowPrecision):
    """Parameters of a column- or a row-parallel layer, as ours has them."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        ours: ColumnParallelLinear | RowParallelLinear,
        *,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = ours.in_features, ours.out_features
        self.sequence_parallel, self.group = ours.sequence_parallel, ours.group
        self.amax_group = ours.group
        self.spec = ours.spec
        device = torch.get_default_device() if device is None else device
        for name in ("weight", "bias"):
            parameter = getattr(ours, name)
            if parameter is None:
                self.register_parameter(name, None)
                continue
            value = torch.empty_like(parameter, device=device)
            self.register_parameter(name, nn.Parameter(value))
            mark(self, name, *specs_of(ours, name))

    def reset_parameters(self, seed: int | None = None, prefix: str = "") -> None:
        """Draw weight and bias as ``nn.Linear`` does; one seed is one model at any size."""
        bound = self.in_features**-0.5 if self.in_features else 0.0
        for name, parameter in self.named_parameters(recurse=False):
            key = key_for(parameter, prefix + name, seed)
            draw = partial(uniform_, key=key, low=-bound, high=bound, specs=specs_of(self, name))
            fill(parameter, draw)

    def held(self) -> dict[str, Tensor | None]:
        """Weight and bias; slices that neighbours hold too sum their gradients."""
        if self.group.size == 1 or not self.spec.has_copies:
            return {"weight": self.weight, "bias": self.bias}
        given = [tensor for tensor in (self.weight, self.bias) if tensor is not None]
        copies = copy_slices_to(*given, specs=[self.spec] * len(given))
        return dict(zip(("weight", "bias"), copies, strict=False))

    def compute(self, engine: Engine, parameters: dict[str, Tensor | None], x: Tensor) -> Tensor:
        """What the engine makes of ``x``, under the module's recipe."""
        self._check_amax_group()
        parameters = {name: each for name, each in parameters.items() if each is not None}
        return engine(
            parameters, x, recipe=self.recipe, amax_group=self.amax_group, scales=self.scales
        )

    def _check_amax_group(self) -> None:
        delayed = isinstance(self.recipe, DelayedScaling)
        if not (delayed and self.sequence_parallel and self.group.size > 1):
            return
        # The ranks exchange rounded tokens, which must have one scale.
        if not set(self.group.ranks) <= set(self.amax_group.ranks):
            raise ValueError(
                f"amax_group={self.amax_group} must hold the ranks {list(self.group.ranks)} "
                "that share tokens under sequence parallelism with delayed scaling"
            )

    def _new_scales(self, length: int) -> nn.Module:
        return Scales(length, device=self.weight.device)

    def extra_repr(self) -> str:
        """The whole sizes and the number of ranks."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, group={self.group.size}, recipe={self.recipe}"
        )


class Linear(ParallelLinear):
    """What ``linear`` builds."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        parallel_mode: Literal["column", "row"],
        bias: bool,
        sequence_parallel: bool,
        segments: Sequence[Segment] | None,
        group: Group,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        check_choice("parallel_mode", parallel_mode, ("column", "row"))
        kind = ColumnParallelLinear if parallel_mode == "column" else RowParallelLinear
        ours = kind(
            in_features,
            out_features,
            bias=bias,
            sequence_parallel=sequence_parallel,
            segments=segments,
            group=group,
            device="meta",
            dtype=dtype,
        )
        super().__init__(ours, device=device)
        self.parallel_mode = parallel_mode
        rows, columns = self.weight.shape
        if parallel_mode == "column":  # Theirs cuts what it is given, evenly.
            rows *= group.size
        else:
            columns *= group.size
        options = {
            # Over several ranks the bias comes after the sum, and its gradient is ours to sum.
            "bias": bias and not self._adds_bias,
            "parallel_mode": parallel_mode if group.size > 1 else None,
            "sequence_parallel": sequence_parallel and group.size > 1,
            "params_dtype": self.weight.dtype,
        }
        self.engine = Engine("Linear", (columns, rows), options, group=group)
        self.reset_parameters()
        self.weight = self.engine.quantised(self.weight)

    @property
    def _adds_bias(self) -> bool:
        return self.parallel_mode == "row" and self.group.size > 1

    def forward(self, x_TI: Tensor) -> Tensor:
        """``x W^T + b``: this rank's features of a column-parallel layer, else whole ones."""
        parameters = self.held()
        bias_O = parameters.pop("bias", None) if self._adds_bias else None
        y_TO = tokens_first(
            x_TI,
            lambda x: self.compute(self.engine, parameters, x),
            group=self.group if self.sequence_parallel else LOCAL,
            scatters=self.parallel_mode == "row",
        )
        if bias_O is None:
            return y_TO
        if self.sequence_parallel:
            bias_O = copy_to(bias_O, group=self.group)
        return y_TO + bias_O.to(y_TO.dtype)


def tokens_first(
    x: Tensor, compute: Callable[[Tensor], Tensor], *, group: Group, scatters: bool
) -> Tensor:
    """Compute with tokens of dim -2 on dim 0, along which Transformer Engine gathers and scatters.

    Raises:
        ValueError: There are no such tokens, or they do not divide evenly where they are scattered.
    """
    if group.size == 1:
        return compute(x)
    if x.dim() < 2 or (scatters and x.shape[-2] % group.size):
        raise ValueError(
            f"x of shape {tuple(x.shape)} must have tokens along dim -2"
            f"{f' that divide evenly over a group of {group.size} ranks' if scatters else ''} "
            "under sequence parallelism"
        )
    return compute(x.movedim(-2, 0)).movedim(0, -2)
