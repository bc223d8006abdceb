"""Decays and step sizes: how they are computed, and their initial values.

Rules of the initial values: Mamba, https://arxiv.org/abs/2312.00752, sections 3.6 and E.2;
Mamba-2, https://arxiv.org/abs/2405.21060. They are computed one by one in float64, so that a value
has the same bits wherever it stands in a rank's share.
"""

import math
from collections.abc import Callable, Sequence
from numbers import Real

import torch
from torch import Tensor
from torch.nn.functional import softplus

from megablocks_core.groups import ShardSpec
from megablocks_core.groups.placements import local
from megablocks_core.layers.ssm.mixers.float32 import wide_dtype
from megablocks_core.parallel.initial import uniform_

# Steps smaller than this are not drawn.
_SMALLEST_STEP = 1e-4


def rates(A_log: Tensor) -> Tensor:
    """Negative rates of decay ``-exp(A_log)``, in float32 at least."""
    return -torch.exp(A_log.to(wide_dtype(A_log.dtype)))


def step_sizes(dt: Tensor, bias: Tensor, limit: tuple[float, float] = (0.0, math.inf)) -> Tensor:
    """``clamp(softplus(dt + bias))``, in float32 at least."""
    kind = wide_dtype(dt.dtype)
    steps = softplus(dt.to(kind) + bias.to(kind))
    return steps if limit == (0.0, math.inf) else steps.clamp(*limit)


def check_range(
    name: str, bounds: tuple[float, float], *, lowest: float, finite: bool = True
) -> None:
    """Raise ``ValueError`` unless ``bounds`` is a range that starts at ``lowest`` or above."""
    pair = isinstance(bounds, tuple | list) and len(bounds) == 2
    if not pair or not all(isinstance(bound, Real) for bound in bounds):
        raise ValueError(f"{name}={bounds!r} must be two numbers (low, high)")
    low, high = bounds
    if not lowest <= low <= high or (finite and high == math.inf):
        raise ValueError(f"{name}={bounds} must be a range (low, high) from {lowest} on")


def draw_log_rates_(
    tensor: Tensor, *, key: int, bounds: tuple[float, float], specs: Sequence[ShardSpec] = ()
) -> None:
    """Fill with logarithms of rates uniform within ``bounds``."""
    uniform_(tensor, key=key, low=bounds[0], high=bounds[1], specs=specs)
    _each_(tensor, math.log)


def draw_step_biases_(
    tensor: Tensor, *, key: int, bounds: tuple[float, float], specs: Sequence[ShardSpec] = ()
) -> None:
    """Fill with what ``softplus`` makes steps log-uniform within ``bounds``."""
    low, high = (math.log(bound) for bound in bounds)
    uniform_(tensor, key=key, low=low, high=high, specs=specs)
    _each_(tensor, lambda value: _inverse_softplus(max(math.exp(value), _SMALLEST_STEP)))


@torch.no_grad()
def number_log_rates_(tensor_DN: Tensor) -> None:
    """Fill [D N] with ``log(1), ..., log(N)`` in every row."""
    if tensor_DN.is_meta:
        return
    held = local(tensor_DN)
    row_N = [math.log(number) for number in range(1, held.shape[1] + 1)]
    held.copy_(torch.tensor(row_N, dtype=torch.float64))


def _inverse_softplus(step: float) -> float:
    return step + math.log(-math.expm1(-step))


@torch.no_grad()
def _each_(tensor: Tensor, function: Callable[[float], float]) -> None:
    if tensor.is_meta:
        return
    held = local(tensor)
    values = [function(value) for value in held.flatten().tolist()]
    held.copy_(torch.tensor(values, dtype=torch.float64).view(held.shape))
