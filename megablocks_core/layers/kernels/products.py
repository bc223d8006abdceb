"""The product of each row with the matrix of its expert, for rows in the order of experts.

The rows are gathered where they are multiplied: no permuted copy of the tokens is made. MegaBlocks
(arXiv 2211.15841) and ScatterMoE (2403.08245) describe such products.

Dimensions: M rows, N places, k at most so many places a row, e experts, O rows and I columns of
an expert's matrix.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megablocks_core.layers.kernels.choice import Kernels, kernels_for
from megablocks_core.layers.kernels.spans import Spans, spans_of


def grouped_product(
    x_MI: Tensor,
    rows_N: Tensor | None,
    weight_eOI: Tensor,
    counts_e: Tensor,
    *,
    places: Tensor | None = None,
    capacity: int | None = None,
    kernels: Kernels | None = None,
) -> Tensor:
    """``y[n] = x[rows[n]] W[e(n)]^T`` [N O]; zero for a negative row and in places not filled.

    Kept for backward are the arguments alone. The gradient of ``x`` is that of each place [N I],
    summed over the places of a row in slot order; that of W[e] is the sum over its places.

    Args:
        x_MI: Tokens [M I].
        rows_N: Which of them each place reads [N], below M, sorted by expert; negative: none.
            ``None``: place n reads row n.
        weight_eOI: The experts' matrices [e O I].
        counts_e: Places that each expert fills [e], at most N in all; stays on its device.
        places: The places that read each row [M k]; negative: none. Needed, with ``rows``, for
            the gradient of ``x``.
        capacity: C, if expert j has the places from j C on; N = e C.
        kernels: What computes it; default ``kernels_for(x)``.

    Raises:
        ValueError: Shapes or dtypes do not fit, or ``places`` is missing where ``x`` has a
            gradient.
    """
    _check(x_MI, rows_N, weight_eOI, counts_e)
    num_places = len(x_MI) if rows_N is None else len(rows_N)
    if capacity is not None and capacity * len(weight_eOI) != num_places:
        raise ValueError(
            f"capacity={capacity} must be {num_places} places over {len(weight_eOI)} experts"
        )
    if rows_N is not None and x_MI.requires_grad and (places is None or len(places) != len(x_MI)):
        shape = None if places is None else [*places.shape]
        raise ValueError(f"places of shape {shape} must be [{len(x_MI)} k] where x has a gradient")
    spans = spans_of(counts_e, num_places, capacity=capacity)
    chosen = kernels or kernels_for(x_MI)
    return _GroupedProduct.apply(chosen, x_MI, rows_N, weight_eOI, *spans, places)


def _check(x: Tensor, rows: Tensor | None, weight: Tensor, counts: Tensor) -> None:
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2]:
        raise ValueError(f"x of shape {[*x.shape]} must be [M I] of weight {[*weight.shape]}")
    if rows is not None and rows.dim() != 1:
        raise ValueError(f"rows of shape {[*rows.shape]} must be a vector")
    if counts.shape != weight.shape[:1]:
        raise ValueError(
            f"counts of shape {[*counts.shape]} must be [{len(weight)}], one an expert"
        )
    if x.dtype != weight.dtype:
        raise ValueError(f"x of {x.dtype} must have the weight's dtype, {weight.dtype}")


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernels: Kernels,
        x_MI: Tensor,
        rows_N: Tensor | None,
        weight_eOI: Tensor,
        starts_e: Tensor,
        ends_e: Tensor,
        places_Mk: Tensor | None,
    ) -> Tensor:
        ctx.kernels = kernels
        ctx.save_for_backward(x_MI, rows_N, weight_eOI, starts_e, ends_e, places_Mk)
        return kernels.product(x_MI, rows_N, weight_eOI, Spans(starts_e, ends_e))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NO: Tensor) -> tuple[Any, ...]:
        x_MI, rows_N, weight_eOI, starts_e, ends_e, places_Mk = ctx.saved_tensors
        kernels, spans = ctx.kernels, Spans(starts_e, ends_e)
        dx_MI = dweight_eOI = None
        if ctx.needs_input_grad[1]:
            dx_MI = kernels.input_gradient(dy_NO, weight_eOI, spans)
            if rows_N is not None:
                dx_MI = kernels.total(dx_MI, places_Mk)
        if ctx.needs_input_grad[3]:
            dweight_eOI = kernels.weight_gradient(dy_NO, x_MI, rows_N, spans)
        return None, dx_MI, None, dweight_eOI, None, None, None
