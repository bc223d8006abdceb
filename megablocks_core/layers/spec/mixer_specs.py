"""What the state-space blocks of a hybrid model are: sizes and features."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

from megablocks_core.parallel.checks import check_whole


@dataclass(frozen=True)
class Mamba1Spec:
    """Sizes and features of Mamba blocks (arXiv:2312.00752).

    Attributes:
        inner_size: Channels inside a block.
        state_size: Features of each channel's state.
        dt_rank: Features from which step sizes are made.
        conv_kernel: Taps of the convolution.
        bias: Biases of the input and output projections.
        conv_bias: A bias of the convolution.

    Raises:
        ValueError: A size is not positive.
    """

    inner_size: int
    state_size: int
    dt_rank: int
    conv_kernel: int = 4
    bias: bool = False
    conv_bias: bool = True

    def __post_init__(self) -> None:
        _check_sizes(self, "inner_size", "state_size", "dt_rank", "conv_kernel")


@dataclass(frozen=True)
class Mamba2Spec:
    """Sizes and features of Mamba-2 blocks (arXiv:2405.21060).

    Attributes:
        num_heads: Heads of a block.
        head_dim: Features of a head.
        state_size: Features of the state, of each feature of a head.
        num_groups: Groups of heads that share input and output matrices; divides ``num_heads``.
        norm_groups: Parts of the features that are normalised each alone; default
            ``num_groups``.
        conv_kernel: Taps of the convolution.
        chunk_size: Tokens that are computed at once; it changes nothing.
        bias: Biases of the input and output projections.
        conv_bias: A bias of the convolution.
        time_step_limit: Step sizes are clamped to this range.

    Raises:
        ValueError: A size is not positive, groups do not divide, or the range is empty.
    """

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int = 1
    norm_groups: int | None = None
    conv_kernel: int = 4
    chunk_size: int = 64
    bias: bool = False
    conv_bias: bool = True
    time_step_limit: tuple[float, float] = (0.0, math.inf)

    def __post_init__(self) -> None:
        names = ("num_heads", "head_dim", "state_size", "num_groups", "conv_kernel", "chunk_size")
        _check_sizes(self, *names)
        if self.num_heads % self.num_groups:
            raise ValueError(f"num_groups={self.num_groups} must divide num_heads={self.num_heads}")
        if self.norm_groups is None:
            object.__setattr__(self, "norm_groups", self.num_groups)
        _check_sizes(self, "norm_groups")
        features = self.num_heads * self.head_dim
        if features % (self.norm_groups or 1):
            raise ValueError(
                f"norm_groups={self.norm_groups} must divide the {features} features of all heads"
            )
        limit = self.time_step_limit
        if not isinstance(limit, tuple | list) or len(limit) != 2:
            raise ValueError(f"time_step_limit={limit!r} must be two numbers (low, high)")
        low, high = limit
        if not all(isinstance(bound, Real) for bound in limit) or not 0 <= low < high:
            raise ValueError(f"time_step_limit={self.time_step_limit} must be a range from 0 on")
        object.__setattr__(self, "time_step_limit", (float(low), float(high)))


@dataclass(frozen=True)
class DeltaSpec:
    """Sizes of gated delta nets (arXiv:2412.06464).

    Attributes:
        num_key_heads: Heads of queries and keys.
        num_value_heads: Heads of values, a multiple of them.
        key_dim: Features of a query's and a key's head.
        value_dim: Features of a value's head.
        conv_kernel: Taps of the convolution.

    Raises:
        ValueError: A size is not positive, or heads do not divide.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int = 4

    def __post_init__(self) -> None:
        _check_sizes(self, *self.__dataclass_fields__)
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"num_key_heads={self.num_key_heads} must divide "
                f"num_value_heads={self.num_value_heads}"
            )


def _check_sizes(spec: Any, *names: str) -> None:
    for name in names:
        check_whole(name, getattr(spec, name), least=1)
