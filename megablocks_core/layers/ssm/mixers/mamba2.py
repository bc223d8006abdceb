"""Mamba-2 (Dao and Gu, https://arxiv.org/abs/2405.21060), tensor- and context-parallel.

Dimensions: T tokens, H hidden size, N features of a state, P features of a head, I features of
all heads. A lowercase letter is this rank's share of the capital one.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megablocks_core.groups import LOCAL, Group, Segment, ShardSpec, check_group, mark, specs_of
from megablocks_core.layers.linear import LinearFactory, parallel_linear
from megablocks_core.layers.ssm.functions.convolution import causal_conv1d
from megablocks_core.layers.ssm.functions.heads import to_tokens
from megablocks_core.layers.ssm.functions.ssd import ssd_chunk_scan
from megablocks_core.layers.ssm.functions.steps import ssd_step
from megablocks_core.layers.ssm.mixers.arguments import check_eps, check_sizes
from megablocks_core.layers.ssm.mixers.by_heads import (
    Context,
    Part,
    channels_to_heads,
    check_context,
    rows_of_heads,
)
from megablocks_core.layers.ssm.mixers.decays import (
    check_range,
    draw_log_rates_,
    draw_step_biases_,
    rates,
    step_sizes,
)
from megablocks_core.layers.ssm.mixers.depthwise import DepthwiseConv1d
from megablocks_core.layers.ssm.mixers.float32 import wide_dtype
from megablocks_core.layers.ssm.mixers.gated_norm import GatedRMSNorm
from megablocks_core.layers.ssm.mixers.mixer import Function, Mixer, Projected
from megablocks_core.layers.ssm.mixers.state import MixerState
from megablocks_core.parallel import SequenceCut
from megablocks_core.parallel.checks import check_flags
from megablocks_core.parallel.initial import key_for


class Weights(NamedTuple):
    """What a convolution and a scan take of some heads.

    Attributes:
        taps: Of the convolution [c W].
        shift: Its bias [c], if it has one.
        A_log: Logarithms of the rates of decay [h].
        D: [h].
        dt_bias: [h].
    """

    taps: Tensor
    shift: Tensor | None
    A_log: Tensor
    D: Tensor
    dt_bias: Tensor


class Mamba2(Mixer):
    """A Mamba-2 mixer whose heads are split over ``tp``.

    Maps ``x`` [... T H] to ``y`` [... T H]: ``in_proj`` makes z, x, B, C and dt; x, B and C pass
    through a convolution with SiLU; ``ssd_chunk_scan``; the gated norm with z; ``out_proj``.
    ``A_log``, ``D`` and ``dt_bias`` stay float32 whatever the module is converted to.

    Forward sends one all-reduce and backward one; under sequence parallelism forward sends an
    all-gather and a reduce-scatter, and backward these two and the second gather of ``x``. With
    fewer groups than ranks backward sends two small messages more, for weights of B and C that
    neighbours hold too; norm groups that span ranks cost an all-reduce of T ``norm_groups`` numbers
    forward and backward. Over ``cp`` see ``causal_conv1d`` and ``ssd_chunk_scan``.

    Args:
        hidden_size: H.
        num_heads: Heads.
        head_dim: P.
        state_size: N.
        num_groups: Groups of heads that share B and C; divides ``num_heads``. Fewer than the
            ranks is served: neighbours then hold the same group.
        conv_kernel: Taps of the convolution.
        chunk_size: Tokens that the scan computes at once; it changes nothing.
        norm_groups: Groups of the norm; default ``num_groups``.
        norm_before_gate: The norm comes before the gate.
        norm_eps: Under the root of the norm.
        bias: Biases of the two projections.
        conv_bias: A bias of the convolution.
        time_step_limit: Step sizes are clamped to it.
        time_step_range: Initial step sizes, log-uniform.
        rate_range: Initial rates of decay, uniform.
        sequence_parallel: The ranks hold equal slices of the tokens.
        linear: Builds the projections; default ``parallel_linear``, which see.
        convolution: Called as ``causal_conv1d`` is.
        scan: Called as ``ssd_chunk_scan`` is.
        tp: The tensor-parallel ranks.
        cp: Ranks that hold pieces of the sequence.
        context: How they work together: "states" passes states on, "heads" exchanges tokens for
            heads and back.
        device: Of the parameters.
        dtype: Of the parameters.

    Raises:
        ValueError: Heads or groups do not divide evenly over each other or over ``tp``, or a range
            is empty.
    """

    keep_float32 = ("A_log", "D", "dt_bias")
    A_log: nn.Parameter
    D: nn.Parameter
    dt_bias: nn.Parameter

    def __init__(  # noqa: PLR0913 (each is an option of its own)
        self,
        hidden_size: int,
        *,
        num_heads: int,
        head_dim: int,
        state_size: int,
        num_groups: int = 1,
        conv_kernel: int = 4,
        chunk_size: int = 64,
        norm_groups: int | None = None,
        norm_before_gate: bool = False,
        norm_eps: float = 1e-5,
        bias: bool = False,
        conv_bias: bool = True,
        time_step_limit: tuple[float, float] = (0.0, math.inf),
        time_step_range: tuple[float, float] = (1e-3, 0.1),
        rate_range: tuple[float, float] = (1.0, 16.0),
        sequence_parallel: bool = False,
        linear: LinearFactory | None = None,
        convolution: Function = causal_conv1d,
        scan: Function = ssd_chunk_scan,
        tp: Group = LOCAL,
        cp: Group = LOCAL,
        context: Context = "states",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(
            hidden_size=hidden_size,
            num_heads=num_heads,
            head_dim=head_dim,
            state_size=state_size,
            num_groups=num_groups,
            conv_kernel=conv_kernel,
            chunk_size=chunk_size,
        )
        self.hidden_size = hidden_size
        norm_groups = num_groups if norm_groups is None else norm_groups
        check_sizes(norm_groups=norm_groups)
        check_eps("norm_eps", norm_eps)
        check_flags(
            norm_before_gate=norm_before_gate,
            bias=bias,
            conv_bias=conv_bias,
            sequence_parallel=sequence_parallel,
        )
        _check_heads(num_heads, num_groups, tp)
        if num_heads * head_dim % norm_groups:
            raise ValueError(
                f"norm_groups={norm_groups} must divide the {num_heads * head_dim} features of "
                "all heads"
            )
        check_context(context, num_heads, tp=tp, cp=cp)
        check_range("time_step_limit", time_step_limit, lowest=0.0, finite=False)
        check_range("time_step_range", time_step_range, lowest=1e-12)
        check_range("rate_range", rate_range, lowest=1e-12)
        self.head_dim, self.state_size, self.tp, self.cp = head_dim, state_size, tp, cp
        self.context: Context = context
        self.num_heads = num_heads // tp.size
        self.num_groups = max(num_groups // tp.size, 1)
        self.time_step_limit, self.time_step_range = time_step_limit, time_step_range
        self.rate_range = rate_range
        self.sequence_parallel = sequence_parallel
        self.convolution, self.scan_step = convolution, ssd_step
        self.scan = partial(scan, chunk_size=chunk_size)
        inner = num_heads * head_dim
        shared = Segment(num_groups * state_size, parts=min(num_groups, tp.size))
        channels = (Segment(inner), shared, shared)
        segments = (Segment(inner), *channels, Segment(num_heads))
        build = partial(
            linear or parallel_linear,
            bias=bias,
            sequence_parallel=sequence_parallel,
            group=tp,
            device=device,
            dtype=dtype,
        )
        self.in_proj = build(
            hidden_size, _total(segments), parallel_mode="column", segments=segments
        )
        self.conv1d = DepthwiseConv1d(
            _total(channels),
            conv_kernel,
            bias=conv_bias,
            segments=channels,
            group=tp,
            device=device,
            dtype=dtype,
        )
        for name in self.keep_float32:
            empty = torch.empty(self.num_heads, device=device, dtype=wide_dtype(dtype))
            self.register_parameter(name, nn.Parameter(empty))
            mark(self, name, ShardSpec(0, tp))
        self.norm = GatedRMSNorm(
            inner,
            groups=norm_groups,
            eps=norm_eps,
            norm_before_gate=norm_before_gate,
            tp=tp,
            device=device,
            dtype=dtype,
        )
        self.out_proj = build(inner, hidden_size, parallel_mode="row")
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None, prefix: str = "") -> None:
        """Draw rates and step sizes; ``D`` is one. One seed is one model at any size."""
        draw_log_rates_(
            self.A_log,
            key=key_for(self.A_log, f"{prefix}A_log", seed),
            bounds=self.rate_range,
            specs=specs_of(self, "A_log"),
        )
        draw_step_biases_(
            self.dt_bias,
            key=key_for(self.dt_bias, f"{prefix}dt_bias", seed),
            bounds=self.time_step_range,
            specs=specs_of(self, "dt_bias"),
        )
        self.D.fill_(1)

    def extra_repr(self) -> str:
        """Sizes of this rank's share."""
        return (
            f"num_heads={self.num_heads}, head_dim={self.head_dim}, "
            f"state_size={self.state_size}, num_groups={self.num_groups}"
        )

    def _parts(self) -> tuple[Part, Part, Part]:
        """This rank's x, B and C."""
        shared = Part(self.num_groups, self.state_size)
        return Part(self.num_heads, self.head_dim), shared, shared

    def _project(self, x_TH: Tensor) -> Projected:
        inner = self.num_heads * self.head_dim
        channels = inner + 2 * self.num_groups * self.state_size
        return Projected(*self.in_proj(x_TH).split((inner, channels, self.num_heads), dim=-1))

    def _mix(
        self, channels: Tensor, steps: Tensor, convolve: Function, scan: Function
    ) -> tuple[Tensor, MixerState]:
        weights = Weights(*self.conv1d.weights(), self.A_log, self.D, self.dt_bias)
        y, state = self._mix_with(weights, channels, steps, convolve, scan)
        return y.flatten(-2), state

    def _mix_by_heads(
        self, channels: Tensor, steps: Tensor, convolve: Function, scan: Function, cut: SequenceCut
    ) -> tuple[Tensor, MixerState]:
        parts, cp = self._parts(), self.cp
        taps, shift = self.conv1d.weights()
        weights = Weights(
            rows_of_heads(taps, parts, cp),
            None if shift is None else rows_of_heads(shift, parts, cp),
            *(x.chunk(cp.size)[cp.rank] for x in (self.A_log, self.D, self.dt_bias)),
        )
        channels, steps = channels_to_heads(
            channels, parts, steps, num_heads=self.num_heads, cut=cut
        )
        y, state = self._mix_with(weights, channels, steps, convolve, scan)
        return to_tokens(y, cut=cut)[0].flatten(-2), state

    def _mix_with(
        self, weights: Weights, channels: Tensor, steps: Tensor, convolve: Function, scan: Function
    ) -> tuple[Tensor, MixerState]:
        """Outputs [... h P] of the heads whose weights these are."""
        inner = len(weights.A_log) * self.head_dim
        shared = (len(weights.taps) - inner) // 2
        channels, conv_state = convolve(channels, weights.taps, weights.shift)
        x, B, C = channels.split((inner, shared, shared), dim=-1)
        y, ssm_state = scan(
            x.unflatten(-1, (-1, self.head_dim)),
            step_sizes(steps, weights.dt_bias, self.time_step_limit),
            rates(weights.A_log),
            B.unflatten(-1, (-1, self.state_size)),
            C.unflatten(-1, (-1, self.state_size)),
            D=weights.D,
        )
        return y, MixerState(conv_state, ssm_state)

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        return self.norm(y, gate)

    def _state_shape(self) -> tuple[int, ...]:
        return self.num_heads, self.head_dim, self.state_size


def _total(segments: tuple[Segment, ...]) -> int:
    return sum(segment.size for segment in segments)


def _check_heads(num_heads: int, num_groups: int, tp: Group) -> None:
    check_group(tp)
    if num_groups < 1 or num_heads % num_groups:
        raise ValueError(f"num_groups={num_groups} must divide num_heads={num_heads}")
    if num_heads % tp.size:
        raise ValueError(
            f"num_heads={num_heads} must divide evenly over a group of {tp.size} ranks"
        )
    if num_groups % tp.size and tp.size % num_groups:
        raise ValueError(
            f"num_groups={num_groups} must divide evenly over a group of {tp.size} ranks, or "
            f"divide {tp.size}"
        )
