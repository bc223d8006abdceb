"""Experts on all places at once, with products that take a stack of matrices.

Nothing is read on the host. Dimensions: N places, C places an expert, H hidden size, e experts
here, i features here, O rows and I columns of any matrix.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from megablocks_core.layers.moe.dispatch.assignment import take_rows
from megablocks_core.layers.moe.experts.function import Gradients, Inputs, Outputs, Wanted
from megablocks_core.layers.moe.experts.passes import (
    hidden,
    hidden_backward,
    row_products,
    scaled,
)
from megablocks_core.layers.moe.experts.projections import Projections
from megablocks_core.layers.moe.experts.ragged_product import ragged_product

# ``grouped_mm`` wants rows of a multiple of 16 bytes, so a column of ones is this wide.
_ONES = 8


class Products(ABC):
    """Products of rows in the order of their experts with the experts' matrices."""

    @abstractmethod
    def forward(self, x_NI: Tensor, w_eOI: Tensor) -> Tensor:
        """``x W^T`` [N O]."""

    @abstractmethod
    def input_gradient(self, dy_NO: Tensor, w_eOI: Tensor) -> Tensor:
        """``dy W`` [N I]."""

    @abstractmethod
    def weight_gradient(self, dy_NO: Tensor, x_NI: Tensor, w_eOI: Tensor) -> Tensor:
        """``dy^T x`` [e O I], as ``w_eOI`` is."""

    @abstractmethod
    def add_bias_(self, y_NO: Tensor, bias_eO: Tensor) -> None:
        """Add to each place its expert's bias."""

    @abstractmethod
    def bias_gradient(self, dy_NO: Tensor, bias_eO: Tensor) -> Tensor:
        """Sums over the places of each expert [e O]."""


@dataclass(frozen=True)
class Batched(Products):
    """As many places for each expert."""

    def forward(self, x_NI: Tensor, w_eOI: Tensor) -> Tensor:
        """``x W^T`` [N O]."""
        return torch.bmm(_stacked(x_NI, w_eOI), w_eOI.transpose(1, 2)).flatten(0, 1)

    def input_gradient(self, dy_NO: Tensor, w_eOI: Tensor) -> Tensor:
        """``dy W`` [N I]."""
        return torch.bmm(_stacked(dy_NO, w_eOI), w_eOI).flatten(0, 1)

    def weight_gradient(self, dy_NO: Tensor, x_NI: Tensor, w_eOI: Tensor) -> Tensor:
        """``dy^T x`` [e O I]."""
        return torch.bmm(_stacked(dy_NO, w_eOI).transpose(1, 2), _stacked(x_NI, w_eOI))

    def add_bias_(self, y_NO: Tensor, bias_eO: Tensor) -> None:
        """Add to each place its expert's bias."""
        _stacked(y_NO, bias_eO).add_(bias_eO.unsqueeze(1))

    def bias_gradient(self, dy_NO: Tensor, bias_eO: Tensor) -> Tensor:
        """Sums over the places of each expert [e O]."""
        return _stacked(dy_NO, bias_eO).sum(1)


@dataclass(frozen=True)
class Ragged(Products):
    """Any number of places for each expert.

    Attributes:
        ends: Where the places of each expert end [e], int32. What lies beyond the last end is
            uninitialised in every result.
    """

    ends: Tensor

    def forward(self, x_NI: Tensor, w_eOI: Tensor) -> Tensor:
        """``x W^T`` [N O]."""
        return ragged_product(x_NI, w_eOI.transpose(1, 2), self.ends)

    def input_gradient(self, dy_NO: Tensor, w_eOI: Tensor) -> Tensor:
        """``dy W`` [N I]."""
        return ragged_product(dy_NO, w_eOI, self.ends)

    def weight_gradient(self, dy_NO: Tensor, x_NI: Tensor, w_eOI: Tensor) -> Tensor:
        """``dy^T x`` [e O I]."""
        return ragged_product(dy_NO.t(), x_NI, self.ends)

    def add_bias_(self, y_NO: Tensor, bias_eO: Tensor) -> None:
        """Add to each place its expert's bias."""
        places = torch.arange(y_NO.shape[0], dtype=self.ends.dtype, device=self.ends.device)
        expert_N = torch.searchsorted(self.ends, places, right=True).clamp(max=len(self.ends) - 1)
        y_NO += bias_eO.index_select(0, expert_N)

    def bias_gradient(self, dy_NO: Tensor, bias_eO: Tensor) -> Tensor:
        """Sums over the places of each expert [e O]."""
        ones = dy_NO.new_ones(dy_NO.shape[0], _ONES)
        return ragged_product(dy_NO.t(), ones, self.ends)[..., 0]


def _stacked(rows_NI: Tensor, stack_e: Tensor) -> Tensor:
    num_experts = stack_e.shape[0]
    return rows_NI.view(num_experts, rows_NI.shape[0] // num_experts, rows_NI.shape[1])


class Whole:
    """Experts on all places at once.

    Without ``bounds``, each expert has as many places; else these say where they end.
    """

    def forward(self, inputs: Inputs, projections: Projections) -> Outputs:
        """Results, and the outputs of the first projections."""
        products, formula = _products(inputs), inputs.formula
        x_NH, weights_N = _tokens(inputs), _hidden_weights(inputs)
        gate_Ni = None
        if projections.gate is not None:
            gate_Ni = _apply(products, x_NH, projections.gate, projections.gate_bias)
        up_Ni = _apply(products, x_NH, projections.up, projections.up_bias)
        weighs_output = formula.weigh == "output"
        hidden_Ni = hidden(formula.activation, gate_Ni, up_Ni, None if weighs_output else weights_N)
        if weighs_output:
            y_NH = _apply(products, hidden_Ni, projections.down, projections.down_bias)
            y_NH = scaled(y_NH, weights_N)
        else:
            y_NH = products.forward(hidden_Ni, projections.down)
            if projections.down_bias is not None:
                y_NH += scaled(_spread(products, y_NH, projections.down_bias), weights_N)
        if inputs.bounds is not None:
            y_NH.masked_fill_(_empty(inputs).unsqueeze(-1), 0)
        return Outputs(y_NH, gate_Ni, up_Ni)

    def backward(
        self,
        dy_NH: Tensor,
        inputs: Inputs,
        outputs: Outputs,
        projections: Projections,
        wanted: Wanted,
    ) -> Gradients:
        """Gradients of tokens, weights and parameters."""
        products, weighs_input = _products(inputs), inputs.formula.weigh == "input"
        x_NH, weights_N = _tokens(inputs), _hidden_weights(inputs)
        dh_Ni = products.input_gradient(dy_NH, projections.down)
        inner = hidden_backward(
            inputs.formula.activation, dh_Ni, outputs.gate, outputs.up, weights_N
        )
        dweights_N, down_bias = inner.weights, projections.down_bias
        assert dweights_N is not None
        weighted_dy_NH = dy_NH
        if down_bias is not None:
            spread_NH = _spread(products, dy_NH, down_bias)
            dweights_N = dweights_N + row_products(dy_NH, spread_NH, weights_N)
            weighted_dy_NH = scaled(dy_NH, weights_N)
        pairs = Projections(
            gate=inner.gate,
            up=inner.up,
            down=dy_NH,
            gate_bias=inner.gate,
            up_bias=inner.up,
            down_bias=weighted_dy_NH,
        )
        own = [
            _parameter_gradient(products, *each, inner.hidden if index == 2 else x_NH)
            for index, each in enumerate(zip(wanted.projections, projections, pairs, strict=True))
        ]
        own = [_delivered(*pair) for pair in zip(own, wanted.into, strict=True)]
        dx_NH = None
        if wanted.x or weighs_input:
            dx_NH = products.input_gradient(inner.up, projections.up)
            if inner.gate is not None and projections.gate is not None:
                dx_NH += products.input_gradient(inner.gate, projections.gate)
        if weighs_input:
            assert dx_NH is not None
            dweights_N = row_products(dx_NH, take_rows(inputs.x, inputs.rows), inputs.weights)
            dx_NH = scaled(dx_NH, inputs.weights)
        return Gradients(dx_NH, torch.where(_empty(inputs), 0, dweights_N), own)


def _products(inputs: Inputs) -> Products:
    return Batched() if inputs.bounds is None else Ragged(inputs.bounds)


def _empty(inputs: Inputs) -> Tensor:
    return inputs.rows < 0


def _tokens(inputs: Inputs) -> Tensor:
    """What the experts read [N H]."""
    x_NH = take_rows(inputs.x, inputs.rows)
    return scaled(x_NH, inputs.weights) if inputs.formula.weigh == "input" else x_NH


def _hidden_weights(inputs: Inputs) -> Tensor:
    """What hidden activations are multiplied by [N]: the weights, or else one where one is."""
    if inputs.formula.weigh != "input":
        return inputs.weights
    return (inputs.rows >= 0).to(inputs.weights.dtype)


def _apply(products: Products, x_NI: Tensor, w_eOI: Tensor, bias_eO: Tensor | None) -> Tensor:
    y_NO = products.forward(x_NI, w_eOI)
    if bias_eO is not None:
        products.add_bias_(y_NO, bias_eO)
    return y_NO


def _spread(products: Products, like_NO: Tensor, bias_eO: Tensor) -> Tensor:
    """The bias of each place's expert [N O]."""
    spread_NO = torch.zeros_like(like_NO)
    products.add_bias_(spread_NO, bias_eO)
    return spread_NO


def _parameter_gradient(
    products: Products,
    is_wanted: bool,
    parameter: Tensor | None,
    dy_NO: Tensor | None,
    x_NI: Tensor,
) -> Tensor | None:
    if not is_wanted or parameter is None or dy_NO is None:
        return None
    if parameter.dim() == 2:
        return products.bias_gradient(dy_NO, parameter)
    return products.weight_gradient(dy_NO, x_NI, parameter)


def _delivered(gradient: Tensor | None, into: Tensor | None) -> Tensor | None:
    if gradient is None or into is None:
        return gradient
    into += gradient
    return None
