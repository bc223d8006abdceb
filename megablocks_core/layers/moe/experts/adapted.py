"""Experts with low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685, section 4).

A product ``W x`` of a place becomes ``W x + scale * B A x`` with its expert's factors. Rows go
through the factors one after the other: ``W + scale * B A`` and its gradient would take the memory
and the time that adapters save, and small numbers of ``B A`` would be lost where the sum is rounded
as ``W`` is. Only the plain twins add it up.

Kept for backward are the tokens, the outputs of ``gate_proj`` and ``up_proj``, the hidden
activation if ``down_proj`` has an adapter, and integers.

Dimensions: M rows, N places, H hidden size, e experts here, i features here, R rank, O rows and I
columns of any matrix.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megablocks_core.layers.moe.dispatch import Dispatched
from megablocks_core.layers.moe.dispatch.assignment import take_rows
from megablocks_core.layers.moe.experts.activations import Activation
from megablocks_core.layers.moe.experts.host_products import multiply, row_step
from megablocks_core.layers.moe.experts.inverse import (
    Inverse,
    inverse_of,
    sum_inverse,
    take_places,
)
from megablocks_core.layers.moe.experts.passes import (
    hidden,
    hidden_backward,
    row_products,
    scaled,
)
from megablocks_core.layers.moe.experts.places import host_counts
from megablocks_core.layers.moe.experts.projections import Formula, Projections
from megablocks_core.layers.moe.experts.whole import Batched, Products, Ragged


class Factors(NamedTuple):
    """The adapters of one stack.

    Attributes:
        a: [e R I].
        b: [e O R].
        scale: Of their product.
    """

    a: Tensor
    b: Tensor
    scale: float


class Adapters(NamedTuple):
    """The adapters of the stacks that have some."""

    gate: Factors | None = None
    up: Factors | None = None
    down: Factors | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> "Adapters":
        """All factors changed by a function."""
        return Adapters(*(x and Factors(change(x.a), change(x.b), x.scale) for x in self))

    def added_to(self, projections: Projections) -> Projections:
        """The weights with their adapters' products: what plain twins compute with."""
        stacks = (projections.gate, projections.up, projections.down)
        gate, up, down = (
            w if w is None or x is None else w + (x.scale * (x.b @ x.a)).to(w.dtype)
            for w, x in zip(stacks, self, strict=True)
        )
        assert up is not None and down is not None
        return projections._replace(gate=gate, up=up, down=down)


def adapted(
    dispatched: Dispatched, projections: Projections, adapters: Adapters, formula: Formula
) -> Tensor:
    """Weighted results of the experts [N H], zero in empty places."""
    layout, inverse = _layout(dispatched), inverse_of(dispatched)
    empty_N, x, rows = dispatched.rows < 0, dispatched.x, dispatched.rows
    weights_N = torch.where(empty_N, 0, dispatched.weights)
    own_N: Tensor | None = weights_N
    if formula.weigh == "input":
        x, rows, own_N = scaled(take_places(x, rows, inverse), weights_N), None, None
    gate_Ni = None
    if projections.gate is not None:
        gate_Ni = _product(layout, x, projections.gate, adapters.gate, rows, inverse)
        gate_Ni = _biased(layout, gate_Ni, projections.gate_bias)
    up_Ni = _product(layout, x, projections.up, adapters.up, rows, inverse)
    up_Ni = _biased(layout, up_Ni, projections.up_bias)
    hidden_Ni = _Hidden.apply(formula.activation, gate_Ni, up_Ni, own_N)
    y_NH = _product(layout, hidden_Ni, projections.down, adapters.down)
    y_NH = _biased(layout, y_NH, projections.down_bias, own_N)
    return y_NH.masked_fill(empty_N.unsqueeze(-1), 0)


class _Layout(NamedTuple):
    """Where the places of each expert lie: each has as many, unless one of these says it.

    Attributes:
        counts: On the host.
        ends: On the device.
    """

    counts: tuple[int, ...] | None = None
    ends: Tensor | None = None


def _layout(dispatched: Dispatched) -> _Layout:
    if dispatched.capacity is not None:
        return _Layout()
    if torch.compiler.is_compiling() or dispatched.x.is_cuda:
        return _Layout(ends=dispatched.tokens_per_expert.cumsum(0).to(torch.int32))
    return _Layout(counts=tuple(host_counts(dispatched)))


def _products(counts: tuple[int, ...] | None, ends: Tensor | None) -> Products:
    if counts is not None:
        return Counted(counts)
    return Batched() if ends is None else Ragged(ends)


@dataclass(frozen=True)
class Counted(Products):
    """Expert after expert.

    Attributes:
        counts: How many places each fills [e]. What lies beyond is uninitialised in results.
    """

    counts: Sequence[int]

    def forward(self, x_NI: Tensor, w_eOI: Tensor) -> Tensor:
        """``x W^T`` [N O]."""
        return self._each(x_NI, w_eOI.transpose(1, 2))

    def input_gradient(self, dy_NO: Tensor, w_eOI: Tensor) -> Tensor:
        """``dy W`` [N I]."""
        return self._each(dy_NO, w_eOI)

    def weight_gradient(self, dy_NO: Tensor, x_NI: Tensor, w_eOI: Tensor) -> Tensor:
        """``dy^T x`` [e O I]."""
        out_eOI = torch.empty_like(w_eOI, memory_format=torch.contiguous_format)
        for places, out_OI in zip(self._places(), out_eOI.unbind(0), strict=True):
            multiply(dy_NO[places].t(), x_NI[places], out=out_OI)
        return out_eOI

    def add_bias_(self, y_NO: Tensor, bias_eO: Tensor) -> None:
        """Add to each place its expert's bias."""
        for places, bias_O in zip(self._places(), bias_eO.unbind(0), strict=True):
            y_NO[places] += bias_O

    def bias_gradient(self, dy_NO: Tensor, bias_eO: Tensor) -> Tensor:
        """Sums over the places of each expert [e O]."""
        return torch.stack([dy_NO[places].sum(0) for places in self._places()])

    def _each(self, x_NI: Tensor, m_eIO: Tensor) -> Tensor:
        """A step too far writes rows of the next experts, who come later."""
        step = row_step(x_NI.dtype)
        y_NO = x_NI.new_empty(x_NI.shape[0], m_eIO.shape[2])
        for places, m_IO in zip(self._places(), m_eIO.unbind(0), strict=True):
            if places.stop > places.start:
                stop = places.start + -(-(places.stop - places.start) // step) * step
                wider = slice(places.start, min(stop, x_NI.shape[0]))
                multiply(x_NI[wider], m_IO, out=y_NO[wider])
        return y_NO

    def _places(self) -> list[slice]:
        starts = accumulate(self.counts, initial=0)
        return [slice(start, start + n) for start, n in zip(starts, self.counts, strict=False)]


def _product(
    layout: _Layout,
    x: Tensor,
    w_eOI: Tensor,
    factors: Factors | None,
    rows_N: Tensor | None = None,
    inverse: Inverse | None = None,
) -> Tensor:
    """``W x + scale * B A x`` of each place [N O], by rows of ``x`` [M I] or for ``x`` [N I]."""
    a, b, scale = factors or (None, None, 1.0)
    places, lengths = (None, None) if rows_N is None or inverse is None else inverse
    return _Product.apply(*layout, scale, x, w_eOI, a, b, rows_N, places, lengths)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        counts: tuple[int, ...] | None,
        ends: Tensor | None,
        scale: float,
        x: Tensor,
        w: Tensor,
        a: Tensor | None,
        b: Tensor | None,
        rows: Tensor | None,
        places: Tensor | None,
        lengths: Tensor | None,
    ) -> Tensor:
        products = _products(counts, ends)
        x_NI = x if rows is None else take_rows(x, rows)
        y_NO = products.forward(x_NI, w)
        if a is not None and b is not None:
            y_NO += products.forward(_low(products, x_NI, a, scale), b).to(y_NO.dtype)
        # A frozen weight without an adapter keeps no input.
        keeps = any(ctx.needs_input_grad[4:7])
        ctx.save_for_backward(ends, x if keeps else None, w, a, b, rows, places, lengths)
        ctx.counts, ctx.scale = counts, scale
        return y_NO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NO: Tensor) -> tuple[Any, ...]:
        ends, x, w, a, b, rows, places, lengths = ctx.saved_tensors
        products, dy_NO = _products(ctx.counts, ends), dy_NO.contiguous()
        wants_x, wants_w, wants_a, wants_b = ctx.needs_input_grad[3:7]
        x_NI: Any = x if rows is None or x is None else take_rows(x, rows)
        dx_NI = products.input_gradient(dy_NO, w) if wants_x else None
        dw = products.weight_gradient(dy_NO, x_NI, w) if wants_w else None
        da = db = None
        if a is not None and b is not None:
            dy = dy_NO.to(b.dtype)
            dlow_NR = products.input_gradient(dy, b) * ctx.scale
            if wants_b:
                db = products.weight_gradient(dy, _low(products, x_NI, a, ctx.scale), b)
            if wants_a:
                da = products.weight_gradient(dlow_NR, x_NI.to(a.dtype), a)
            if dx_NI is not None:
                dx_NI += products.input_gradient(dlow_NR, a).to(dx_NI.dtype)
        if dx_NI is not None and rows is not None:
            dx_NI = sum_inverse(dx_NI, Inverse(places, lengths))
        return None, None, None, dx_NI, dw, da, db, None, None, None


def _low(products: Products, x_NI: Tensor, a_eRI: Tensor, scale: float) -> Tensor:
    """The low-rank features, scaled [N R]."""
    return products.forward(x_NI.to(a_eRI.dtype), a_eRI) * scale


class _Hidden(torch.autograd.Function):
    """The hidden activation, times the weights if given; its own result is not kept."""

    @staticmethod
    def forward(
        ctx: Any,
        activation: Activation,
        gate_Ni: Tensor | None,
        up_Ni: Tensor,
        weights_N: Tensor | None,
    ) -> Tensor:
        ctx.activation = activation
        ctx.save_for_backward(gate_Ni, up_Ni, weights_N)
        return hidden(activation, gate_Ni, up_Ni, weights_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh_Ni: Tensor) -> tuple[Any, ...]:
        inner = hidden_backward(ctx.activation, dh_Ni, *ctx.saved_tensors)
        return None, inner.gate, inner.up, inner.weights


def _biased(
    layout: _Layout, y_NO: Tensor, bias_eO: Tensor | None, weights_N: Tensor | None = None
) -> Tensor:
    """Rows and their experts' biases, times the weights if given."""
    return y_NO if bias_eO is None else _Biased.apply(*layout, y_NO, bias_eO, weights_N)


class _Biased(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        counts: tuple[int, ...] | None,
        ends: Tensor | None,
        y_NO: Tensor,
        bias_eO: Tensor,
        weights_N: Tensor | None,
    ) -> Tensor:
        ctx.counts = counts
        ctx.save_for_backward(ends, bias_eO, weights_N)
        return y_NO + _spread(_products(counts, ends), y_NO, bias_eO, weights_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NO: Tensor) -> tuple[Any, ...]:
        ends, bias_eO, weights_N = ctx.saved_tensors
        products, dbias, dweights = _products(ctx.counts, ends), None, None
        if ctx.needs_input_grad[3]:
            own_NO = dy_NO.contiguous() if weights_N is None else scaled(dy_NO, weights_N)
            dbias = products.bias_gradient(own_NO, bias_eO)
        if weights_N is not None:
            dweights = row_products(dy_NO, _spread(products, dy_NO, bias_eO, None), weights_N)
        return None, None, dy_NO, dbias, dweights


def _spread(
    products: Products, like_NO: Tensor, bias_eO: Tensor, weights_N: Tensor | None
) -> Tensor:
    spread_NO = torch.zeros_like(like_NO, memory_format=torch.contiguous_format)
    products.add_bias_(spread_NO, bias_eO)
    return spread_NO if weights_N is None else scaled(spread_NO, weights_N)
