"""Products in FP8 by torchao, where a tensor has one scale: with ``torch._scaled_mm`` inside.

Scales are those of the emulation, over the ranks of ``amax_group``; the numbers and the products
are torchao's ``Float8TrainingTensor``. It is imported when a layer computes, never before.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megablocks_core.groups import LOCAL, Group, Segment
from megablocks_core.numbers.formats import E5M2
from megablocks_core.parallel.checks import check_choice
from megablocks_core.parallel.optional import imported
from megablocks_core.parallel.recipes.emulation import Engine
from megablocks_core.parallel.recipes.layers import (
    EmulatedColumnLinear,
    EmulatedLinear,
    EmulatedRowLinear,
)
from megablocks_core.parallel.recipes.recipe import CurrentScaling, DelayedScaling, Recipe
from megablocks_core.parallel.recipes.rounding import Rounding

_TENSORS = "torchao.float8.float8_training_tensor"
_MULTIPLE = 16  # of the sizes of matrices, for ``torch._scaled_mm``


def torchao_linear_factory(
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
    """A layer for ``linear=``, as ``emulated_linear_factory`` builds, with torchao's products.

    It serves ``CurrentScaling`` and ``DelayedScaling`` with "quantized" backward, on NVIDIA GPUs
    since Ada and on CPUs, for bfloat16, float16 and float32. Other recipes are refused when they
    are set, and sizes of this rank's share that are no multiples of 16.

    Raises:
        ValueError: A size does not divide evenly, or there is no such ``parallel_mode``.
    """
    check_choice("parallel_mode", parallel_mode, ("column", "row"))
    kind = {"column": TorchaoColumnLinear, "row": TorchaoRowLinear}[parallel_mode]
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


class _Torchao(EmulatedLinear):
    """What both layers share."""

    def _check(self, recipe: Recipe) -> None:
        check_served(recipe, self.weight)

    def _engine(self) -> Engine | None:
        return ENGINE


class TorchaoColumnLinear(_Torchao, EmulatedColumnLinear):
    """``EmulatedColumnLinear`` with torchao's products."""


class TorchaoRowLinear(_Torchao, EmulatedRowLinear):
    """``EmulatedRowLinear`` with torchao's products."""


def check_served(recipe: Recipe, weight: Tensor) -> None:
    """Raise unless torchao computes by the recipe with this weight.

    Raises:
        ValueError: It does not.
        ImportError: torchao is not installed.
    """
    served = isinstance(recipe, CurrentScaling | DelayedScaling)
    if not served or getattr(recipe, "backward", "quantized") != "quantized":
        raise ValueError(
            f"recipe={recipe} must be CurrentScaling or DelayedScaling with quantized backward: "
            "torchao serves no other here"
        )
    if any(size % _MULTIPLE for size in weight.shape):
        raise ValueError(
            f"weight of shape {list(weight.shape)} must have sizes that are multiples of "
            f"{_MULTIPLE} for torchao"
        )
    imported(_TENSORS, "Float8TrainingTensor", extra="ao")


def _cast(rounding: Rounding, x: Tensor) -> Any:
    """A matrix as torchao's tensor of 8 bits, under the scale that the rounding has."""
    roles = imported(_TENSORS, "GemmInputRole", extra="ao")
    role = {"input": roles.INPUT, "weight": roles.WEIGHT, "gradient": roles.GRAD_OUTPUT}
    cast = imported(_TENSORS, "hp_tensor_and_scale_to_float8", extra="ao")
    dtype = torch.float8_e5m2 if rounding.to is E5M2 else torch.float8_e4m3fn
    return cast(x.contiguous(), rounding.scale(), dtype, _options(), role[rounding.operand])


def _product(a: Any, b: Any) -> Tensor:
    if 0 in (*a.shape, *b.shape):
        return torch.zeros(a.shape[0], b.shape[1], device=a.device)
    with torch.autocast(a.device.type, enabled=False):
        return torch.mm(a, b)


@lru_cache(maxsize=1)
def _options() -> Any:
    """Fast sums in the forward product, exact ones in backward; inner sizes are padded."""
    options = imported(_TENSORS, "LinearMMConfig", extra="ao")
    product = imported(_TENSORS, "ScaledMMConfig", extra="ao")
    return options(*(product(False, fast, False, True) for fast in (True, False, False)))


ENGINE = Engine(_cast, _cast, _product)
