"""Mamba (Gu and Dao, https://arxiv.org/abs/2312.00752), tensor- and context-parallel.

Dimensions: T tokens, H hidden size, I inner size, N features of a state, R rank of step sizes. A
lowercase letter is this rank's share of the capital one.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as product
from torch.nn.functional import rms_norm

from megablocks_core.groups import (
    LOCAL,
    Group,
    Segment,
    ShardSpec,
    check_group,
    copy_to,
    mark,
    specs_of,
    split_evenly,
)
from megablocks_core.layers.linear import LinearFactory, parallel_linear
from megablocks_core.layers.norm import RMSNorm
from megablocks_core.layers.ssm.functions.convolution import causal_conv1d
from megablocks_core.layers.ssm.functions.selective import selective_scan
from megablocks_core.layers.ssm.functions.steps import selective_step
from megablocks_core.layers.ssm.mixers.arguments import check_eps, check_sizes
from megablocks_core.layers.ssm.mixers.decays import (
    check_range,
    draw_step_biases_,
    number_log_rates_,
    rates,
    step_sizes,
)
from megablocks_core.layers.ssm.mixers.depthwise import DepthwiseConv1d
from megablocks_core.layers.ssm.mixers.float32 import Float32Parameters, wide_dtype
from megablocks_core.layers.ssm.mixers.gated_norm import gated
from megablocks_core.layers.ssm.mixers.mixer import Function, Mixer, Projected
from megablocks_core.layers.ssm.mixers.state import MixerState
from megablocks_core.parallel.checks import check_flags
from megablocks_core.parallel.initial import key_for, uniform_


class Mamba1(Mixer):
    """A Mamba mixer whose channels are split over ``tp``.

    Maps ``x`` [... T H] to ``y`` [... T H]: ``in_proj`` makes x and z; x passes through a
    convolution with SiLU; ``x_proj`` makes a short dt, B and C of it, and ``dt_proj`` the step
    sizes; ``selective_scan``; times ``silu(z)``; ``out_proj``. ``A_log``, ``D`` and the bias of
    ``dt_proj`` stay float32 whatever the module is converted to.

    Forward sends two all-reduces, of T H and T (R + 2 N), and backward the same; under sequence
    parallelism that of T H is an all-gather and a reduce-scatter, and backward these two and the
    second gather of ``x``. Over ``cp`` see ``causal_conv1d`` and ``selective_scan``.

    Args:
        hidden_size: H.
        inner_size: I; default 2 H.
        state_size: N.
        conv_kernel: Taps of the convolution.
        dt_rank: R; default H / 16, rounded up.
        bias: Biases of the input and output projections.
        conv_bias: A bias of the convolution.
        projection_norms: RMS norms of dt, B and C: with weights (Jamba), or "plain" ones
            (FalconMamba).
        norm_eps: Under their roots.
        chunk_size: Tokens that the scan computes at once; it changes nothing.
        time_step_range: Initial step sizes, log-uniform.
        sequence_parallel: The ranks hold equal slices of the tokens.
        linear: Builds the projections; default ``parallel_linear``, which see.
        convolution: Called as ``causal_conv1d`` is.
        scan: Called as ``selective_scan`` is.
        tp: The tensor-parallel ranks.
        cp: Ranks that hold pieces of the sequence.
        device: Of the parameters.
        dtype: Of the parameters.

    Raises:
        ValueError: ``inner_size`` does not divide evenly over ``tp``, or a choice is unknown.
    """

    keep_float32 = ("A_log", "D")
    A_log: nn.Parameter
    D: nn.Parameter

    def __init__(  # noqa: PLR0913 (each is an option of its own)
        self,
        hidden_size: int,
        *,
        inner_size: int | None = None,
        state_size: int = 16,
        conv_kernel: int = 4,
        dt_rank: int | None = None,
        bias: bool = False,
        conv_bias: bool = True,
        projection_norms: Literal["weights", "plain"] | None = None,
        norm_eps: float = 1e-6,
        chunk_size: int = 64,
        time_step_range: tuple[float, float] = (1e-3, 0.1),
        sequence_parallel: bool = False,
        linear: LinearFactory | None = None,
        convolution: Function = causal_conv1d,
        scan: Function = selective_scan,
        tp: Group = LOCAL,
        cp: Group = LOCAL,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_group(cp)
        check_sizes(hidden_size=hidden_size)
        if projection_norms not in (None, "weights", "plain"):
            raise ValueError(f"projection_norms={projection_norms!r} must be 'weights' or 'plain'")
        inner_size = 2 * hidden_size if inner_size is None else inner_size
        dt_rank = -(-hidden_size // 16) if dt_rank is None else dt_rank
        check_sizes(
            inner_size=inner_size,
            state_size=state_size,
            conv_kernel=conv_kernel,
            dt_rank=dt_rank,
            chunk_size=chunk_size,
        )
        check_eps("norm_eps", norm_eps)
        check_flags(bias=bias, conv_bias=conv_bias, sequence_parallel=sequence_parallel)
        self.hidden_size = hidden_size
        own = split_evenly(inner_size, group=tp, name="inner_size")
        self.inner_size, self.state_size, self.dt_rank = own.stop - own.start, state_size, dt_rank
        self.projection_norms, self.norm_eps = projection_norms, norm_eps
        self.tp, self.cp = tp, cp
        self.sequence_parallel = sequence_parallel
        self.convolution, self.scan_step = convolution, selective_step
        self.scan = partial(scan, chunk_size=chunk_size)
        place = {"device": device, "dtype": dtype}
        build = partial(linear or parallel_linear, group=tp, **place)
        outer = partial(build, bias=bias, sequence_parallel=sequence_parallel)
        self.in_proj = outer(
            hidden_size, 2 * inner_size, parallel_mode="column", segments=(Segment(inner_size),) * 2
        )
        self.conv1d = DepthwiseConv1d(inner_size, conv_kernel, bias=conv_bias, group=tp, **place)
        self.x_proj = build(inner_size, dt_rank + 2 * state_size, parallel_mode="row", bias=False)
        self.dt_proj = StepProjection(
            dt_rank, inner_size, time_step_range=time_step_range, group=tp, **place
        )
        if projection_norms == "weights":
            norm = partial(RMSNorm, eps=norm_eps, **place)
            self.dt_layernorm = norm(dt_rank)
            self.b_layernorm, self.c_layernorm = norm(state_size), norm(state_size)
        shapes = {"A_log": (self.inner_size, state_size), "D": (self.inner_size,)}
        for name, shape in shapes.items():
            empty = torch.empty(shape, device=device, dtype=wide_dtype(dtype))
            self.register_parameter(name, nn.Parameter(empty))
            mark(self, name, ShardSpec(0, tp))
        self.out_proj = outer(inner_size, hidden_size, parallel_mode="row")
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None, prefix: str = "") -> None:
        """Rates are 1, ..., N and ``D`` is one, whatever the seed."""
        number_log_rates_(self.A_log)
        self.D.fill_(1)

    def extra_repr(self) -> str:
        """Sizes of this rank's share."""
        return f"inner_size={self.inner_size}, state_size={self.state_size}, dt_rank={self.dt_rank}"

    def _project(self, x_TH: Tensor) -> Projected:
        channels, gate = self.in_proj(x_TH).chunk(2, dim=-1)
        return Projected(gate, channels, channels[..., :0])

    def _mix(
        self, channels: Tensor, steps: Tensor, convolve: Function, scan: Function
    ) -> tuple[Tensor, MixerState]:
        x, conv_state = convolve(channels, *self.conv1d.weights())
        # Every rank makes the whole of these and uses it on its own channels.
        sizes = (self.dt_rank, self.state_size, self.state_size)
        parts = torch.cat(self._normalised(*self.x_proj(x).split(sizes, dim=-1)), dim=-1)
        dt, B, C = copy_to(parts, group=self.tp).split(sizes, dim=-1)
        y, ssm_state = scan(x, self.dt_proj(dt), rates(self.A_log), B, C, D=self.D)
        return y, MixerState(conv_state, ssm_state)

    def _normalised(self, dt: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.projection_norms == "weights":
            return self.dt_layernorm(dt), self.b_layernorm(B), self.c_layernorm(C)
        if self.projection_norms == "plain":
            dt, B, C = (rms_norm(part, part.shape[-1:], eps=self.norm_eps) for part in (dt, B, C))
        return dt, B, C

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        return gated(y, gate)

    def _state_shape(self) -> tuple[int, ...]:
        return self.inner_size, self.state_size


class StepProjection(Float32Parameters):
    """Step sizes [... i] from the short ``dt`` [... R]: ``softplus(dt W^T + b)``.

    Float32 at least comes out, and the bias stays so. ``dt`` is whole on every rank, and the
    gradient that leaves here is this rank's part.

    Args:
        rank: R.
        channels: I.
        time_step_range: Initial step sizes, log-uniform.
        group: The tensor-parallel ranks.
        device: Of the parameters.
        dtype: Of the weight.

    Raises:
        ValueError: The range is empty.
    """

    keep_float32 = ("bias",)

    def __init__(
        self,
        rank: int,
        channels: int,
        *,
        time_step_range: tuple[float, float],
        group: Group = LOCAL,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_range("time_step_range", time_step_range, lowest=1e-12)
        self.time_step_range = time_step_range
        spec = ShardSpec(0, group)
        own = spec.held_length(channels)
        self.weight = nn.Parameter(torch.empty(own, rank, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(own, device=device, dtype=wide_dtype(dtype)))
        mark(self, "weight", spec)
        mark(self, "bias", spec)
        self.reset_parameters()

    def reset_parameters(self, seed: int | None = None, prefix: str = "") -> None:
        """Draw the weight within R^-0.5, and the bias by the range of step sizes."""
        bound = self.weight.shape[1] ** -0.5
        uniform_(
            self.weight,
            key=key_for(self.weight, f"{prefix}weight", seed),
            low=-bound,
            high=bound,
            specs=specs_of(self, "weight"),
        )
        draw_step_biases_(
            self.bias,
            key=key_for(self.bias, f"{prefix}bias", seed),
            bounds=self.time_step_range,
            specs=specs_of(self, "bias"),
        )

    def forward(self, dt: Tensor) -> Tensor:
        """The step sizes."""
        return step_sizes(product(dt, self.weight), self.bias)
