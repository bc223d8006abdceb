"""The kernels in plain torch: what each of them computes, on any device and in any dtype.

Dimensions: M rows, N places, T tokens, k slots a token, H features, e experts, O rows and I
columns of an expert's matrix.
"""

import torch
from torch import Tensor

from megablocks_core.layers.kernels.spans import Spans


class Plain:
    """``choice.Kernels`` in plain torch. Its products read the spans on the host."""

    def take(self, x_MH: Tensor, rows_N: Tensor, weights_N: Tensor | None = None) -> Tensor:
        """Rows of ``x``, times the weights if given; zero where the index is negative [N H]."""
        taken = _taken(x_MH, rows_N)
        return taken if weights_N is None else _weighted(taken, weights_N).to(x_MH.dtype)

    def total(self, y_NH: Tensor, places_Tk: Tensor, weights_N: Tensor | None = None) -> Tensor:
        """For each token the sum over its places, weighted if asked, in slot order [T H]."""
        total = y_NH.new_zeros(places_Tk.shape[0], y_NH.shape[1], dtype=_wide(y_NH))
        for places_T in places_Tk.unbind(1):
            taken = _taken(y_NH, places_T)
            if weights_N is not None:
                taken = _weighted(taken, _taken(weights_N, places_T))
            total += taken
        return total.to(y_NH.dtype)

    def row_products(self, x_MH: Tensor, rows_N: Tensor, y_NH: Tensor) -> Tensor:
        """The inner product of ``x[rows[n]]`` and ``y[n]`` [N], float32 at least."""
        taken = _taken(x_MH, rows_N).to(_wide(x_MH))
        return (taken * y_NH).sum(1).masked_fill_(rows_N < 0, 0)

    def product(
        self, x_MI: Tensor, rows_N: Tensor | None, weight_eOI: Tensor, spans: Spans
    ) -> Tensor:
        """``x[rows[n]] W[e(n)]^T`` [N O], zero outside the spans; no rows: ``x`` in order."""
        num_places = x_MI.shape[0] if rows_N is None else rows_N.shape[0]
        y_NO = x_MI.new_zeros(num_places, weight_eOI.shape[1])
        for weight_OI, places in zip(weight_eOI, _slices(spans), strict=True):
            y_NO[places] = _some(x_MI, rows_N, places) @ weight_OI.T
        return y_NO

    def input_gradient(self, dy_NO: Tensor, weight_eOI: Tensor, spans: Spans) -> Tensor:
        """``dy[n] W[e(n)]`` [N I], zero outside the spans."""
        return self.product(dy_NO, None, weight_eOI.transpose(1, 2), spans)

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
        if into is None:
            into = x_MI.new_zeros(len(spans.starts), dy_NO.shape[1], x_MI.shape[1])
        for into_OI, places in zip(into, _slices(spans), strict=True):
            dy = dy_NO[places]
            if rows_N is not None:
                dy = dy.masked_fill((rows_N[places] < 0).unsqueeze(1), 0)
            into_OI += dy.T @ _some(x_MI, rows_N, places)
        return into


def _taken(x_M: Tensor, rows_N: Tensor) -> Tensor:
    if x_M.shape[0] == 0:
        return x_M.new_zeros(rows_N.shape[0], *x_M.shape[1:])
    taken = x_M.index_select(0, rows_N.clamp(min=0))
    return taken.masked_fill_((rows_N < 0).view(-1, *[1] * (x_M.dim() - 1)), 0)


def _some(x_MI: Tensor, rows_N: Tensor | None, places: slice) -> Tensor:
    return x_MI[places] if rows_N is None else _taken(x_MI, rows_N[places])


def _weighted(rows_NH: Tensor, weights_N: Tensor) -> Tensor:
    wide = _wide(rows_NH)
    return rows_NH.to(wide) * weights_N.to(wide).unsqueeze(1)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _slices(spans: Spans) -> list[slice]:
    return [slice(start, end) for start, end in zip(*map(Tensor.tolist, spans), strict=True)]
