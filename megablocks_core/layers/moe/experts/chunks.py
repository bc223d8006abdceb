"""Experts one after the other, in a few buffers that all of them use in turn.

On a CPU a fresh large tensor costs as much as the product that fills it, so each expert's rows
pass through scratch memory that stays in the cache, and gradients of parameters are written where
they stay. Rows are counted in the steps of ``row_step``: a product writes some rows too many,
which are the next expert's, who comes later. Rows of zeros take their place where products sum
over rows.

Dimensions: N places, n places of one expert, p those and the padding, H hidden size, i features
here.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megablocks_core.layers.moe.experts import passes
from megablocks_core.layers.moe.experts.function import Gradients, Inputs, Outputs, Wanted
from megablocks_core.layers.moe.experts.host_products import add_multiplied, multiply, row_step
from megablocks_core.layers.moe.experts.memory import FRESH, Memory
from megablocks_core.layers.moe.experts.passes import HiddenGradients
from megablocks_core.layers.moe.experts.passes_into import hidden_backward_into, hidden_into
from megablocks_core.layers.moe.experts.projections import Projections


class Span(NamedTuple):
    """The places of one expert, ``start`` to ``stop``, and ``end`` with the padding."""

    start: int
    stop: int
    end: int

    @property
    def places(self) -> slice:
        """Those filled."""
        return slice(self.start, self.stop)

    @property
    def padded(self) -> slice:
        """Those that products write."""
        return slice(self.start, self.end)

    @property
    def count(self) -> int:
        """How many are filled."""
        return self.stop - self.start


class Chunks:
    """Experts one after the other.

    Args:
        counts: How many places each expert fills, one after the other.
        memory: Of results, gradients and what backward reads.
    """

    def __init__(self, counts: Sequence[int], *, memory: Memory = FRESH) -> None:
        self._counts, self._memory = counts, memory

    def forward(self, inputs: Inputs, projections: Projections) -> Outputs:
        """Results, and the outputs of the first projections."""
        spans, formula = self._spans(inputs.x.dtype), inputs.formula
        rows, x = max(_rows(spans), inputs.rows.shape[0]), inputs.x
        features, hidden_size = projections.up.shape[1:]
        gate_Ni = None
        if projections.gate is not None:
            gate_Ni = self._memory.tensor("gate", x, rows, features)
        up_Ni = self._memory.tensor("up", x, rows, features)
        y_NH = self._memory.tensor("y", x, rows, hidden_size)
        x_pH, hidden_pi = _scratch(spans, x, hidden_size), _scratch(spans, x, features)
        for span, expert in zip(spans, projections.unstacked(), strict=True):
            if span.count == 0:
                continue
            rows_pH = _gather(inputs, span, x_pH)
            gate_ni = None
            if gate_Ni is not None and expert.gate is not None:
                gate_ni = _product(rows_pH, expert.gate, expert.gate_bias, gate_Ni, span)
            up_ni = _product(rows_pH, expert.up, expert.up_bias, up_Ni, span)
            weights_n = inputs.weights[span.places]
            own_n = weights_n if formula.weigh == "hidden" else None
            own_pi = hidden_pi[: span.end - span.start]
            hidden_into(formula.activation, gate_ni, up_ni, own_n, own_pi)
            multiply(own_pi, expert.down.t(), out=y_NH[span.padded])
            _finish(y_NH[span.places], expert.down_bias, own_n)
            if formula.weigh == "output":
                y_NH[span.places].copy_(passes.scaled(y_NH[span.places], weights_n))
        filled, places = sum(self._counts), inputs.rows.shape[0]
        y_NH[filled:places].zero_()
        kept = slice(filled)
        return Outputs(y_NH[:places], None if gate_Ni is None else gate_Ni[kept], up_Ni[kept])

    def backward(
        self,
        dy_NH: Tensor,
        inputs: Inputs,
        outputs: Outputs,
        projections: Projections,
        wanted: Wanted,
    ) -> Gradients:
        """Gradients of tokens, weights and parameters."""
        spans, x, weigh = self._spans(inputs.x.dtype), inputs.x, inputs.formula.weigh
        features, hidden_size = projections.up.shape[1:]
        sums = Sums(projections, wanted, self._memory)
        dx_NH = None
        if wanted.x or weigh == "input":
            rows = max(_rows(spans), dy_NH.shape[0])
            dx_NH = self._memory.tensor("dx", x, rows, hidden_size)
        dweights_N = torch.zeros_like(inputs.weights)
        scratch = _Scratch(
            *(_scratch(spans, x, hidden_size) for _ in range(2)),
            *(_scratch(spans, x, features) for _ in range(4)),
        )
        for index, (span, expert) in enumerate(zip(spans, projections.unstacked(), strict=True)):
            if span.count == 0:
                sums.skip(index)
                continue
            own, rows_pH = scratch.of(span), _gather(inputs, span, scratch.x)
            dy_pH = _padded(dy_NH, span, own.dy)
            multiply(dy_pH, expert.down, out=own.dh)
            weights_n = inputs.weights[span.places]
            hidden_backward_into(
                inputs.formula.activation,
                own.dh,
                None if outputs.gate is None else outputs.gate[span.places],
                outputs.up[span.places],
                None if weigh == "input" else weights_n,
                HiddenGradients(own.hidden, own.gate, own.up, dweights_N[span.places]),
            )
            if expert.down_bias is not None:
                dy_nH = dy_NH[span.places]
                if weigh != "input":
                    dweights_N[span.places] += passes.row_products(
                        dy_nH, expert.down_bias.expand_as(dy_nH), weights_n
                    )
                    dy_nH = passes.scaled(dy_nH, weights_n)
                sums.add_bias(5, index, dy_nH)
            sums.add(2, index, dy_pH, own.hidden)
            sums.add(0, index, own.gate, rows_pH)
            sums.add(1, index, own.up, rows_pH)
            sums.add_bias(3, index, own.gate)
            sums.add_bias(4, index, own.up)
            if dx_NH is not None:
                dx_pH = dx_NH[span.padded]
                multiply(own.up, expert.up, out=dx_pH)
                if expert.gate is not None:
                    add_multiplied(own.gate, expert.gate, to=dx_pH)
                if weigh == "input":
                    dx_nH = dx_NH[span.places]
                    x_nH = x.index_select(0, inputs.rows[span.places])
                    dweights_N[span.places] = passes.row_products(dx_nH, x_nH, weights_n)
                    dx_nH.copy_(passes.scaled(dx_nH, weights_n))
        return Gradients(dx_NH, dweights_N, sums.left)

    def _spans(self, dtype: torch.dtype) -> list[Span]:
        step, spans, start = row_step(dtype), [], 0
        for count in self._counts:
            spans.append(Span(start, start + count, start + -(-count // step) * step))
            start += count
        return spans


class _Scratch(NamedTuple):
    """Buffers for one expert at a time: rows of H, then of i features."""

    x: Tensor
    dy: Tensor
    dh: Tensor
    hidden: Tensor
    gate: Tensor
    up: Tensor

    def of(self, span: Span) -> "_Scratch":
        """As many rows as an expert has, padding included."""
        return _Scratch(*(buffer[: span.end - span.start] for buffer in self))


class Sums:
    """Gradients of parameters, an expert at a time.

    Attributes:
        left: Those to return: fresh ones, that is, not those added to what was there.
    """

    def __init__(self, projections: Projections, wanted: Wanted, memory: Memory) -> None:
        self._into = wanted.into
        self.left = wanted.to_return(projections, memory)

    def add(self, which: int, expert: int, dy_pO: Tensor, x_pI: Tensor) -> None:
        """``dy^T x`` of one expert."""
        into, left = self._into[which], self.left[which]
        if into is not None:
            add_multiplied(dy_pO.t(), x_pI, to=into[expert])
        elif left is not None:
            multiply(dy_pO.t(), x_pI, out=left[expert])

    def add_bias(self, which: int, expert: int, dy_nO: Tensor) -> None:
        """The sum over the rows of one expert."""
        into, left = self._into[which], self.left[which]
        if into is not None:
            into[expert] += dy_nO.sum(0)
        elif left is not None:
            torch.sum(dy_nO, 0, out=left[expert])

    def skip(self, expert: int) -> None:
        """An expert without rows."""
        for left in self.left:
            if left is not None:
                left[expert].zero_()


def _rows(spans: Sequence[Span]) -> int:
    """Rows that the products of all experts write."""
    return max((span.end for span in spans), default=0)


def _scratch(spans: Sequence[Span], like: Tensor, width: int) -> Tensor:
    return like.new_empty(max((span.end - span.start for span in spans), default=0), width)


def _gather(inputs: Inputs, span: Span, scratch_pH: Tensor) -> Tensor:
    """The rows that one expert reads [p H], weighted if its input is."""
    rows_pH = scratch_pH[: span.end - span.start]
    own_nH = rows_pH[: span.count]
    torch.index_select(inputs.x, 0, inputs.rows[span.places], out=own_nH)
    if inputs.formula.weigh == "input":
        own_nH.copy_(passes.scaled(own_nH, inputs.weights[span.places]))
    rows_pH[span.count :].zero_()
    return rows_pH


def _product(
    x_pI: Tensor, w_OI: Tensor, bias_O: Tensor | None, out_NO: Tensor, span: Span
) -> Tensor:
    """``x W^T + b`` of the filled places [n O], written where they lie."""
    multiply(x_pI, w_OI.t(), out=out_NO[span.padded])
    own_nO = out_NO[span.places]
    return own_nO if bias_O is None else own_nO.add_(bias_O)


def _finish(y_nH: Tensor, bias_H: Tensor | None, weights_n: Tensor | None) -> None:
    if bias_H is not None:
        y_nH += bias_H if weights_n is None else passes.scaled(bias_H.expand_as(y_nH), weights_n)


def _padded(dy_NH: Tensor, span: Span, scratch_pH: Tensor) -> Tensor:
    """The gradient's rows [p H]: what is too many are others', or zeros behind the last."""
    if span.end <= dy_NH.shape[0]:
        return dy_NH[span.padded]
    scratch_pH[: span.count] = dy_NH[span.places]
    scratch_pH[span.count :].zero_()
    return scratch_pH
