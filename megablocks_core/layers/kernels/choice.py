"""Which kernels serve a tensor.

Dimensions: M rows, N places, T tokens, k slots a token, H features, e experts, O rows and I
columns of an expert's matrix.
"""

from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megablocks_core.layers.kernels.plain import Plain
from megablocks_core.layers.kernels.spans import Spans

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Kernels(Protocol):
    """What is computed on rows, without a graph. Sums are taken in float32 at least."""

    def take(self, x_MH: Tensor, rows_N: Tensor, weights_N: Tensor | None = None) -> Tensor:
        """Rows of ``x``, times the weights if given; zero where the index is negative [N H]."""
        ...

    def total(self, y_NH: Tensor, places_Tk: Tensor, weights_N: Tensor | None = None) -> Tensor:
        """For each token the sum over its places, weighted if asked, in slot order [T H]."""
        ...

    def row_products(self, x_MH: Tensor, rows_N: Tensor, y_NH: Tensor) -> Tensor:
        """The inner product of ``x[rows[n]]`` and ``y[n]`` [N], float32 at least."""
        ...

    def product(
        self, x_MI: Tensor, rows_N: Tensor | None, weight_eOI: Tensor, spans: Spans
    ) -> Tensor:
        """``x[rows[n]] W[e(n)]^T`` [N O], zero outside the spans; no rows: ``x`` in order."""
        ...

    def input_gradient(self, dy_NO: Tensor, weight_eOI: Tensor, spans: Spans) -> Tensor:
        """``dy[n] W[e(n)]`` [N I], zero outside the spans."""
        ...

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
        ...


def kernels_for(x: Tensor) -> Kernels:
    """Triton's for a CUDA tensor of 16 or 32 bits where Triton is installed; else plain torch's."""
    if x.is_cuda and x.dtype in _DTYPES and find_spec("triton") is not None:
        from megablocks_core.layers.kernels.launches import Launches

        return Launches()
    return Plain()


def triton_serves(*tensors: Tensor | None) -> bool:
    """Whether kernels of sequences in Triton can take these tensors, instead of plain torch.

    They must lie on CUDA, have no float64 among them, and hold something. Compilers get plain
    torch, which they fuse themselves.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    if not all(tensor.is_cuda for tensor in given) or torch.compiler.is_compiling():
        return False
    return all(map(_is_served, given)) and find_spec("triton") is not None


def _is_served(tensor: Tensor) -> bool:
    fits = tensor.dtype in _DTYPES or not tensor.dtype.is_floating_point
    return fits and tensor.numel() > 0 and not isinstance(tensor, FakeTensor)
