"""Gated delta networks (Yang et al., https://arxiv.org/abs/2412.06464) as Qwen3-Next has them.

Dimensions: T tokens, H hidden size, N key heads, M value heads, K and V features of their heads.
A lowercase letter is this rank's share of the capital one.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megablocks_core.groups import (
    LOCAL,
    Group,
    Segment,
    ShardSpec,
    copy_to,
    mark,
    specs_of,
    split_evenly,
)
from megablocks_core.layers.linear import LinearFactory, apply_each, parallel_linear
from megablocks_core.layers.ssm.functions.convolution import causal_conv1d
from megablocks_core.layers.ssm.functions.delta import gated_delta_rule
from megablocks_core.layers.ssm.functions.heads import to_tokens
from megablocks_core.layers.ssm.functions.steps import gated_delta_step
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

# Added to the square of a query's or key's length before it is made 1.
_LENGTH_EPS = 1e-6


class Weights(NamedTuple):
    """What a convolution and a scan take of some heads.

    Attributes:
        taps: Of the convolution [c W].
        A_log: Logarithms of the rates of decay [m].
        dt_bias: [m].
    """

    taps: Tensor
    A_log: Tensor
    dt_bias: Tensor


class GatedDeltaNet(Mixer):
    """A gated delta net whose heads are split over ``tp``.

    Maps ``x`` [... T H] to ``y`` [... T H]: projections make queries, keys and values, which pass
    through a convolution with SiLU, a gate z, a strength beta = ``sigmoid(b)`` and a decay
    ``exp(-exp(A_log) softplus(a + dt_bias))`` for each value head; queries and keys get length 1;
    ``gated_delta_rule``; the norm of each head, then its gate; ``out_proj``. A key head serves
    M / N neighbouring value heads. ``A_log`` and ``dt_bias`` stay float32 whatever the module is
    converted to.

    ``in_proj_qkvz`` packs q, k, the values and the gates of a key head behind each other, key head
    by key head; ``in_proj_ba`` the strengths and decays likewise.

    Forward sends one all-reduce; backward sends one, and a small one for the weight of the norm.
    Under sequence parallelism forward sends an all-gather and a reduce-scatter, and backward these
    two, the second gather of ``x`` and the small one. Over ``cp`` see ``causal_conv1d`` and
    ``gated_delta_rule``.

    Args:
        hidden_size: H.
        num_key_heads: N.
        num_value_heads: M, a multiple of N.
        key_dim: K.
        value_dim: V.
        conv_kernel: Taps of the convolution.
        norm_eps: Under the root of the norm.
        chunk_size: Tokens that the rule computes at once; it changes nothing.
        time_step_range: Initial step sizes, log-uniform.
        rate_range: Initial rates of decay, uniform.
        sequence_parallel: The ranks hold equal slices of the tokens.
        linear: Builds the projections; default ``parallel_linear``, which see.
        convolution: Called as ``causal_conv1d`` is.
        scan: Called as ``gated_delta_rule`` is.
        tp: The tensor-parallel ranks.
        cp: Ranks that hold pieces of the sequence.
        context: How they work together: "states" passes states on, "heads" exchanges tokens for
            heads and back.
        device: Of the parameters.
        dtype: Of the parameters.

    Raises:
        ValueError: Heads do not divide evenly over each other or over ``tp``, or a range is empty.
    """

    keep_float32 = ("A_log", "dt_bias")
    A_log: nn.Parameter
    dt_bias: nn.Parameter

    def __init__(  # noqa: PLR0913 (each is an option of its own)
        self,
        hidden_size: int,
        *,
        num_key_heads: int,
        num_value_heads: int,
        key_dim: int,
        value_dim: int,
        conv_kernel: int = 4,
        norm_eps: float = 1e-6,
        chunk_size: int = 64,
        time_step_range: tuple[float, float] = (1e-3, 0.1),
        rate_range: tuple[float, float] = (0.01, 16.0),
        sequence_parallel: bool = False,
        linear: LinearFactory | None = None,
        convolution: Function = causal_conv1d,
        scan: Function = gated_delta_rule,
        tp: Group = LOCAL,
        cp: Group = LOCAL,
        context: Context = "states",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(
            hidden_size=hidden_size,
            num_key_heads=num_key_heads,
            num_value_heads=num_value_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            conv_kernel=conv_kernel,
            chunk_size=chunk_size,
        )
        check_eps("norm_eps", norm_eps)
        check_flags(sequence_parallel=sequence_parallel)
        self.hidden_size = hidden_size
        if num_value_heads % num_key_heads:
            raise ValueError(
                f"num_key_heads={num_key_heads} must divide num_value_heads={num_value_heads}"
            )
        split_evenly(num_key_heads, group=tp, name="num_key_heads")
        check_context(context, num_value_heads, tp=tp, cp=cp)
        check_range("time_step_range", time_step_range, lowest=1e-12)
        check_range("rate_range", rate_range, lowest=1e-12)
        self.key_heads, self.value_heads = num_key_heads // tp.size, num_value_heads // tp.size
        self.key_dim, self.value_dim, self.tp, self.cp = key_dim, value_dim, tp, cp
        self.context: Context = context
        self.time_step_range, self.rate_range = time_step_range, rate_range
        self.sequence_parallel = sequence_parallel
        self.convolution, self.scan_step = convolution, gated_delta_step
        self.scan = partial(scan, chunk_size=chunk_size)
        keys, values = num_key_heads * key_dim, num_value_heads * value_dim
        place = {"device": device, "dtype": dtype}
        build = partial(
            linear or parallel_linear,
            bias=False,
            sequence_parallel=sequence_parallel,
            group=tp,
            **place,
        )
        # Packed key head by key head, so an even cut gives every rank whole heads.
        self.in_proj_qkvz = build(hidden_size, 2 * (keys + values), parallel_mode="column")
        self.in_proj_ba = build(hidden_size, 2 * num_value_heads, parallel_mode="column")
        self.conv1d = DepthwiseConv1d(
            2 * keys + values,
            conv_kernel,
            bias=False,
            segments=(Segment(keys), Segment(keys), Segment(values)),
            group=tp,
            **place,
        )
        for name in self.keep_float32:
            empty = torch.empty(self.value_heads, device=device, dtype=wide_dtype(dtype))
            self.register_parameter(name, nn.Parameter(empty))
            mark(self, name, ShardSpec(0, tp))
        self.norm = GatedRMSNorm(value_dim, eps=norm_eps, norm_before_gate=True, **place)
        self.out_proj = build(values, hidden_size, parallel_mode="row")
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None, prefix: str = "") -> None:
        """Draw rates and step sizes; one seed is one model at any size."""
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

    def extra_repr(self) -> str:
        """Sizes of this rank's share."""
        return (
            f"key_heads={self.key_heads}, value_heads={self.value_heads}, "
            f"key_dim={self.key_dim}, value_dim={self.value_dim}"
        )

    def _project(self, x_TH: Tensor) -> Projected:
        qkvz, ba = apply_each(x_TH, self.in_proj_qkvz, self.in_proj_ba)
        served = self.value_heads // self.key_heads
        sizes = (self.key_dim, self.key_dim, *(served * self.value_dim,) * 2)
        q, k, v, z = (
            part.flatten(-2)
            for part in qkvz.unflatten(-1, (self.key_heads, sum(sizes))).split(sizes, dim=-1)
        )
        strengths, decays = ba.unflatten(-1, (self.key_heads, 2, served)).unbind(-2)
        steps = torch.cat((strengths.flatten(-2), decays.flatten(-2)), dim=-1)
        return Projected(z, torch.cat((q, k, v), dim=-1), steps)

    def _mix(
        self, channels: Tensor, steps: Tensor, convolve: Function, scan: Function
    ) -> tuple[Tensor, MixerState]:
        taps, _ = self.conv1d.weights()
        weights = Weights(taps, self.A_log, self.dt_bias)
        y, state = self._mix_with(weights, channels, steps, convolve, scan)
        return y.flatten(-2), state

    def _mix_by_heads(
        self, channels: Tensor, steps: Tensor, convolve: Function, scan: Function, cut: SequenceCut
    ) -> tuple[Tensor, MixerState]:
        keys = Part(self.key_heads, self.key_dim)
        parts, cp = (keys, keys, Part(self.value_heads, self.value_dim)), self.cp
        taps, _ = self.conv1d.weights()
        weights = Weights(
            rows_of_heads(taps, parts, cp),
            *(x.chunk(cp.size)[cp.rank] for x in (self.A_log, self.dt_bias)),
        )
        channels, *each = channels_to_heads(
            channels, parts, *steps.chunk(2, dim=-1), num_heads=self.value_heads, cut=cut
        )
        y, state = self._mix_with(weights, channels, torch.cat(each, dim=-1), convolve, scan)
        return to_tokens(y, cut=cut)[0].flatten(-2), state

    def _mix_with(
        self, weights: Weights, channels: Tensor, steps: Tensor, convolve: Function, scan: Function
    ) -> tuple[Tensor, MixerState]:
        """Outputs [... m V] of the value heads whose weights these are."""
        heads = len(weights.A_log)
        values = heads * self.value_dim
        keys = (len(weights.taps) - values) // 2
        channels, conv_state = convolve(channels, weights.taps, None)
        q, k, v = channels.split((keys, keys, values), dim=-1)
        q, k = (self._unit(part, heads) for part in (q, k))
        strengths, decays = steps.chunk(2, dim=-1)
        y, ssm_state = scan(
            q,
            k,
            v.unflatten(-1, (heads, self.value_dim)),
            rates(weights.A_log) * step_sizes(decays, weights.dt_bias),
            strengths.to(wide_dtype(strengths.dtype)).sigmoid(),
        )
        return y, MixerState(conv_state, ssm_state)

    def _unit(self, part: Tensor, value_heads: int) -> Tensor:
        """Queries or keys [... m K] of length 1, one for each value head."""
        heads = part.unflatten(-1, (-1, self.key_dim))
        wide = heads.to(wide_dtype(heads.dtype))
        unit = wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + _LENGTH_EPS)
        return unit.to(part.dtype).repeat_interleave(value_heads // heads.shape[-2], dim=-2)

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        heads = (self.value_heads, self.value_dim)
        weight = copy_to(self.norm.weight, group=self.tp)
        return self.norm.with_weight(
            y.unflatten(-1, heads), gate.unflatten(-1, heads), weight
        ).flatten(-2)

    def _state_shape(self) -> tuple[int, ...]:
        return self.value_heads, self.key_dim, self.value_dim
