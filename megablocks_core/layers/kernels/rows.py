"""Rows of tokens in the order of experts, and the sum over the slots of each token.

One is the adjoint of the other, and each is a gather: no atomics, the same bits in each run.

Dimensions: M rows, N places, k at most so many places a row, H features.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megablocks_core.layers.kernels.choice import Kernels, kernels_for


def permute(
    x_MH: Tensor,
    rows_N: Tensor,
    places_Mk: Tensor,
    *,
    weights: Tensor | None = None,
    kernels: Kernels | None = None,
) -> Tensor:
    """``y[n] = weights[n] x[rows[n]]`` [N H], zero where the row is negative.

    Backward sums the gradients of a row's places in slot order, in float32 at least.

    Args:
        x_MH: Tokens [M H].
        rows_N: Which of them each place reads [N], below M; negative: none.
        places_Mk: The places that read each row [M k]; negative: none.
        weights: Of the places [N].
        kernels: What computes it; default ``kernels_for(x)``.

    Raises:
        ValueError: A shape does not fit.
    """
    _check(x_MH, len(x_MH), rows_N, places_Mk, weights)
    return _Permute.apply(kernels or kernels_for(x_MH), x_MH, rows_N, places_Mk, weights)


def unpermute(
    y_NH: Tensor,
    places_Tk: Tensor,
    rows_N: Tensor,
    *,
    weights: Tensor | None = None,
    kernels: Kernels | None = None,
) -> Tensor:
    """For each token the sum of ``weights[p] y[p]`` over its places p, in slot order [T H].

    The sum is taken in float32 at least. Backward gives each place the gradient of its token.

    Args:
        y_NH: What the experts made [N H].
        places_Tk: The places of each token [T k], below N; negative: none.
        rows_N: The token of each place [N]; negative: none.
        weights: Of the places [N].
        kernels: What computes it; default ``kernels_for(y)``.

    Raises:
        ValueError: A shape does not fit.
    """
    _check(y_NH, len(places_Tk), rows_N, places_Tk, weights)
    if len(y_NH) != len(rows_N):
        raise ValueError(
            f"rows of shape {[*rows_N.shape]} must name one of {len(y_NH)} places each"
        )
    return _Unpermute.apply(kernels or kernels_for(y_NH), y_NH, places_Tk, rows_N, weights)


def _check(
    values: Tensor, num_rows: int, rows: Tensor, places: Tensor, weights: Tensor | None
) -> None:
    if values.dim() != 2 or rows.dim() != 1:
        raise ValueError(
            f"values of shape {[*values.shape]} must be a matrix, rows of {[*rows.shape]} a vector"
        )
    if places.dim() != 2 or len(places) != num_rows:
        raise ValueError(f"places of shape {[*places.shape]} must be [{num_rows} k]")
    if weights is not None and weights.shape != rows.shape:
        raise ValueError(f"weights of shape {[*weights.shape]} must be as rows, {[*rows.shape]}")


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernels: Kernels,
        x_MH: Tensor,
        rows_N: Tensor,
        places_Mk: Tensor,
        weights_N: Tensor | None,
    ) -> Tensor:
        ctx.kernels = kernels
        wants_weights = weights_N is not None and weights_N.requires_grad
        ctx.save_for_backward(rows_N, places_Mk, weights_N, x_MH if wants_weights else None)
        return kernels.take(x_MH, rows_N, weights_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NH: Tensor) -> tuple[Any, ...]:
        rows_N, places_Mk, weights_N, x_MH = ctx.saved_tensors
        dx_MH = dweights_N = None
        if ctx.needs_input_grad[1]:
            dx_MH = ctx.kernels.total(dy_NH, places_Mk, weights_N)
        if ctx.needs_input_grad[4]:
            dweights_N = ctx.kernels.row_products(x_MH, rows_N, dy_NH).to(weights_N.dtype)
        return None, dx_MH, None, None, dweights_N


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernels: Kernels,
        y_NH: Tensor,
        places_Tk: Tensor,
        rows_N: Tensor,
        weights_N: Tensor | None,
    ) -> Tensor:
        ctx.kernels = kernels
        wants_weights = weights_N is not None and weights_N.requires_grad
        ctx.save_for_backward(rows_N, weights_N, y_NH if wants_weights else None)
        return kernels.total(y_NH, places_Tk, weights_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_TH: Tensor) -> tuple[Any, ...]:
        rows_N, weights_N, y_NH = ctx.saved_tensors
        dy_NH = dweights_N = None
        if ctx.needs_input_grad[1]:
            dy_NH = ctx.kernels.take(dout_TH, rows_N, weights_N)
        if ctx.needs_input_grad[4]:
            dweights_N = ctx.kernels.row_products(dout_TH, rows_N, y_NH).to(weights_N.dtype)
        return None, dy_NH, None, None, dweights_N
