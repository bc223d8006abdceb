"""A norm and a column-parallel linear layer as one module of Transformer Engine.

Dimensions: T tokens, I input features, O output features, o this rank's.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megablocks_core.groups import LOCAL, Group, Segment, copy_to
from megablocks_core.parallel.checks import check_choice
from megablocks_core.parallel.tensor.linear import ColumnParallelLinear
from megablocks_core.parallel.transformer_engine.engine import Engine
from megablocks_core.parallel.transformer_engine.linear import ParallelLinear, tokens_first
from megablocks_core.parallel.transformer_engine.norms import Normalization, NormWeights

_THEIR_NAMES = {"rms": "RMSNorm", "layer": "LayerNorm"}


def norm_linear(
    in_features: int,
    out_features: int,
    *,
    normalization: Normalization = "rms",
    eps: float = 1e-6,
    zero_centered: bool = False,
    bias: bool = True,
    sequence_parallel: bool = False,
    segments: Sequence[Segment] | None = None,
    group: Group = LOCAL,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> "NormLinear":
    """``transformer_engine.pytorch.LayerNormLinear``: a norm, then a column-parallel layer.

    Maps ``x`` [T I] to this rank's ``y`` [T o]. Parameters are ``norm.weight``, of a "layer" norm
    ``norm.bias``, ``weight`` and ``bias``, with marks, initial values and messages of a norm used
    by ``on_part`` and a ``ColumnParallelLinear``.

    Args:
        in_features: I.
        out_features: O.
        normalization: "rms" or "layer".
        eps: Of the norm.
        zero_centered: ``1 + norm.weight`` takes the place of ``norm.weight``.
        bias: Add a bias to the linear layer.
        sequence_parallel: The ranks hold equal slices of the tokens, along dim -2.
        segments: Packed parts of the output features.
        group: The tensor-parallel ranks.
        device: Of the parameters.
        dtype: Of the parameters.

    Raises:
        ImportError: Transformer Engine is missing.
        ValueError: A size does not divide evenly, or ``segments`` do not add up.
    """
    check_choice("normalization", normalization, tuple(_THEIR_NAMES))
    norm = NormWeights(
        in_features,
        with_bias=normalization == "layer",
        zero_centered=zero_centered,
        device=device,
        dtype=dtype,
    )
    ours = ColumnParallelLinear(
        in_features,
        out_features,
        bias=bias,
        sequence_parallel=sequence_parallel,
        segments=segments,
        group=group,
        device="meta",
        dtype=dtype,
    )
    return NormLinear(norm, ours, _THEIR_NAMES[normalization], eps=eps, device=device)


class NormLinear(ParallelLinear):
    """What ``norm_linear`` builds."""

    def __init__(
        self,
        norm: NormWeights,
        ours: ColumnParallelLinear,
        normalization: str,
        *,
        eps: float,
        device: torch.device | str | None,
    ) -> None:
        super().__init__(ours, device=device)
        self.norm, self.eps = norm, eps
        rows, columns = self.weight.shape
        options = {
            "eps": eps,
            "normalization": normalization,
            "zero_centered_gamma": norm.zero_centered,
            "bias": self.bias is not None,
            "parallel_mode": "column" if self.group.size > 1 else None,
            "sequence_parallel": self.sequence_parallel and self.group.size > 1,
            "params_dtype": self.weight.dtype,
        }
        sizes = (columns, rows * self.group.size)
        self.engine = Engine("LayerNormLinear", sizes, options, group=self.group)
        self.reset_parameters()
        self.weight = self.engine.quantised(self.weight)

    def forward(self, x_TI: Tensor) -> Tensor:
        """``norm(x) W^T + b``: this rank's features."""
        parameters = {**self.held(), **self._norm_parameters()}
        return tokens_first(
            x_TI,
            lambda x: self.compute(self.engine, parameters, x),
            group=self.group if self.sequence_parallel else LOCAL,
            scatters=False,
        )

    def _norm_parameters(self) -> dict[str, Tensor]:
        """Of the norm, by their names; on a part of the tokens their gradients are summed."""
        held = dict(self.norm.named_parameters())
        given = list(held.values())
        if self.sequence_parallel and self.group.size > 1:
            copies = copy_to(*given, group=self.group)
            given = list(copies) if isinstance(copies, tuple) else [copies]
        return {f"layer_norm_{name}": each for name, each in zip(held, given, strict=True)}
