"""The kernels in Triton: grids, block sizes and what each is handed.

Dimensions: M rows, N places, T tokens, k slots a token, H features, e experts, O rows and I
columns of an expert's matrix.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs

from megablocks_core.layers.kernels.launching import arrays, launch, parts
from megablocks_core.layers.kernels.product_kernels import product_kernel, weight_gradient_kernel
from megablocks_core.layers.kernels.row_kernels import (
    row_products_kernel,
    take_kernel,
    total_kernel,
)
from megablocks_core.layers.kernels.spans import Spans, tiles_of

# Rows times features of a program that moves rows, and the widest part of a row it takes.
_MOVED, _WIDEST = 4096, 1024


class Blocks(NamedTuple):
    """What one program of a product takes: a block of each dimension, warps, stages of loads."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


class Launches:
    """``choice.Kernels`` in Triton. Nothing is read on the host, and no atomics add."""

    def take(self, x_MH: Tensor, rows_N: Tensor, weights_N: Tensor | None = None) -> Tensor:
        """Rows of ``x``, times the weights if given; zero where the index is negative [N H]."""
        num_places, num_features = rows_N.shape[0], x_MH.shape[1]
        taken_NH = x_MH.new_empty(num_places, num_features)
        blocks = _row_blocks(num_features)
        grid = (parts(num_places, blocks["ROWS"]), parts(num_features, blocks["FEATURES"]))
        given = arrays(taken_NH, x_MH, rows_N, weights_N)
        sizes, weighted = (num_places, num_features), weights_N is not None
        launch(take_kernel, grid, *given, *sizes, WEIGHTED=weighted, **blocks)
        return taken_NH

    def total(self, y_NH: Tensor, places_Tk: Tensor, weights_N: Tensor | None = None) -> Tensor:
        """For each token the sum over its places, weighted if asked, in slot order [T H]."""
        (num_tokens, num_slots), num_features = places_Tk.shape, y_NH.shape[1]
        total_TH = y_NH.new_empty(num_tokens, num_features)
        blocks = _row_blocks(num_features)
        grid = (parts(num_tokens, blocks["ROWS"]), parts(num_features, blocks["FEATURES"]))
        given = arrays(total_TH, y_NH, places_Tk, weights_N)
        sizes, weighted = (num_tokens, num_slots, num_features), weights_N is not None
        launch(total_kernel, grid, *given, *sizes, WEIGHTED=weighted, **blocks)
        return total_TH

    def row_products(self, x_MH: Tensor, rows_N: Tensor, y_NH: Tensor) -> Tensor:
        """The inner product of ``x[rows[n]]`` and ``y[n]`` [N], float32."""
        num_places, num_features = y_NH.shape
        products_N = x_MH.new_empty(num_places, dtype=torch.float32)
        blocks = _row_blocks(num_features)
        grid = (parts(num_places, blocks["ROWS"]),)
        given = arrays(products_N, x_MH, rows_N, y_NH)
        launch(row_products_kernel, grid, *given, num_places, num_features, **blocks)
        return products_N

    def product(
        self, x_MI: Tensor, rows_N: Tensor | None, weight_eOI: Tensor, spans: Spans
    ) -> Tensor:
        """``x[rows[n]] W[e(n)]^T`` [N O], zero outside the spans; no rows: ``x`` in order."""
        return _product(x_MI, rows_N, weight_eOI.contiguous(), spans, transposed=False)

    def input_gradient(self, dy_NO: Tensor, weight_eOI: Tensor, spans: Spans) -> Tensor:
        """``dy[n] W[e(n)]`` [N I], zero outside the spans."""
        return _product(dy_NO, None, weight_eOI.contiguous(), spans, transposed=True)

    def weight_gradient(
        self,
        dy_NO: Tensor,
        x_MI: Tensor,
        rows_N: Tensor | None,
        spans: Spans,
        *,
        into: Tensor | None = None,
    ) -> Tensor:
        """``dW[e]``, the sum of ``dy[n]^T x[rows[n]]`` over its places; added to ``into``."""
        num_outputs, num_inputs = dy_NO.shape[1], x_MI.shape[1]
        num_experts = spans.starts.shape[0]
        gradient = x_MI.new_empty(num_experts, num_outputs, num_inputs) if into is None else into
        blocks = _product_blocks(x_MI.dtype)
        # The rows are what is summed over here, so they take the block of the inputs.
        blocks = blocks._replace(rows=blocks.inputs, inputs=blocks.outputs)
        grid = (
            parts(num_outputs, blocks.outputs),
            parts(num_inputs, blocks.inputs),
            num_experts,
        )
        given = arrays(gradient, dy_NO, x_MI, rows_N, *spans)
        named = {"GATHERED": rows_N is not None, "ADDED": into is not None, **_named(blocks)}
        launch(weight_gradient_kernel, grid, *given, num_outputs, num_inputs, **named)
        return gradient


def _product(
    x_MI: Tensor, rows_N: Tensor | None, weight: Tensor, spans: Spans, *, transposed: bool
) -> Tensor:
    num_places = x_MI.shape[0] if rows_N is None else rows_N.shape[0]
    _, stride_output, stride_input = weight.stride()
    _, num_outputs, num_inputs = weight.shape
    if transposed:
        num_outputs, num_inputs = num_inputs, num_outputs
        stride_output, stride_input = stride_input, stride_output
    y_NO = x_MI.new_zeros(num_places, num_outputs)
    blocks = _product_blocks(x_MI.dtype)
    tiles = tiles_of(spans, num_places, blocks.rows)
    grid = (tiles.experts.shape[0], parts(num_outputs, blocks.outputs))
    given = arrays(y_NO, x_MI, rows_N, weight, *tiles)
    sizes = (num_outputs, num_inputs, stride_output, stride_input)
    launch(product_kernel, grid, *given, *sizes, GATHERED=rows_N is not None, **_named(blocks))
    return y_NO


def _row_blocks(num_features: int) -> dict[str, int]:
    features = min(triton.next_power_of_2(max(num_features, 1)), _WIDEST)
    # Unfused multiplications and additions give the bits of the twin.
    return {"ROWS": _MOVED // features, "FEATURES": features, "enable_fp_fusion": False}


def _product_blocks(dtype: torch.dtype) -> Blocks:
    # Products of float32 take no tensor cores, so that they are as exact as torch's.
    return Blocks(64, 64, 32, 4, 2) if dtype == torch.float32 else Blocks(128, 128, 64, 8, 3)


def _named(blocks: Blocks) -> dict[str, Any]:
    return {
        "WIDENED": knobs.runtime.interpret,
        "ROWS": blocks.rows,
        "OUTPUTS": blocks.outputs,
        "INPUTS": blocks.inputs,
        "num_warps": blocks.num_warps,
        "num_stages": blocks.num_stages,
        "enable_fp_fusion": True,
    }
