"""Experts by tiles of a processor (``cpp/tile_experts.hpp``): SwiGLU in bfloat16 without biases.

oneDNN packs an expert's weight again for each product, which with many experts takes as long as
the product. Here a weight is packed while it is read, activations and their gradients are made
beside the products, and gradients of weights are written once, where they stay. ``Chunks`` is
the plain twin; it rounds the gradient of the hidden activation, which here stays in float32.

Dimensions: N places, H hidden size, i features here, e experts here.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megablocks_core.layers.moe.experts.function import Gradients, Inputs, Outputs, Wanted
from megablocks_core.layers.moe.experts.memory import FRESH, Memory
from megablocks_core.layers.moe.experts.projections import Formula, Projections

try:
    import megablocks_core._native as _native
except ModuleNotFoundError:  # a pure wheel; an extension that is there and broken still raises
    _native = None

# What H and i are multiples of: the rows and columns of the sums made at a time.
_BLOCK = 32


def tiles_fit(x: Tensor, weights: Tensor, projections: Projections, formula: Formula) -> bool:
    """Whether tiles compute these experts, and this processor multiplies them."""
    if _native is None or formula.weigh != "hidden" or formula.activation.swiglu is None:
        return False
    if any(bias is not None for bias in projections[3:]) or weights.dtype != torch.float32:
        return False
    rows = [x, *(stack for stack in projections[:3] if stack is not None)]
    fits = all(each.dtype == torch.bfloat16 and each.device.type == "cpu" for each in rows)
    sizes = projections.up.shape[1:]
    return (
        fits
        and all(size and size % _BLOCK == 0 for size in sizes)
        and bool(_native.bfloat16_units())
    )


class Tiles:
    """Experts one after the other, each by all threads.

    Of the outputs for backward, ``gate`` and ``up`` both hold numbers of either, in the order in
    which backward reads them: the lower and the upper half of the features.

    Args:
        counts: How many places each expert fills, one after the other.
        memory: Of results, gradients and what backward reads.
        unit: One of ``_native.bfloat16_units()``; default the first, which is the fastest.
    """

    def __init__(
        self, counts: Sequence[int], *, memory: Memory = FRESH, unit: str | None = None
    ) -> None:
        assert _native is not None
        self._counts, self._memory = np.array(counts, dtype=np.int64), memory
        self._unit = _native.bfloat16_units()[0] if unit is None else unit

    def forward(self, inputs: Inputs, projections: Projections) -> Outputs:
        """Results, and the outputs of the first projections."""
        assert _native is not None
        filled, places = int(self._counts.sum()), inputs.rows.shape[0]
        features, hidden_size = projections.up.shape[1:]
        lower_width = (features // _BLOCK + 1) // 2 * 2 * _BLOCK
        lower = self._memory.tensor("lower", inputs.x, filled, lower_width)
        upper = self._memory.tensor("upper", inputs.x, filled, 2 * features - lower_width)
        y_NH = self._memory.tensor("y", inputs.x, places, hidden_size)
        y_NH[filled:].zero_()
        _native.experts_forward(
            **self._read(inputs, projections),
            lower=_bits(lower),
            upper=_bits(upper),
            out=_bits(y_NH),
            threads=torch.get_num_threads(),
        )
        return Outputs(y_NH, lower, upper)

    def backward(
        self,
        dy_NH: Tensor,
        inputs: Inputs,
        outputs: Outputs,
        projections: Projections,
        wanted: Wanted,
    ) -> Gradients:
        """Gradients of tokens, weights and parameters."""
        assert _native is not None and outputs.gate is not None
        dx_NH = self._memory.tensor("dx", dy_NH, *dy_NH.shape) if wanted.x else None
        dweights_N = torch.zeros_like(inputs.weights)
        left = wanted.to_return(projections, self._memory)
        gate, up, down = (
            _optional(own if into is None else into)
            for own, into in zip(left[:3], wanted.into[:3], strict=True)
        )
        of_gate, of_up, of_down, *_ = (into is not None for into in wanted.into)
        _native.experts_backward(
            **self._read(inputs, projections),
            dy=_bits(dy_NH),
            lower=_bits(outputs.gate),
            upper=_bits(outputs.up),
            of_x=_optional(dx_NH),
            of_weights=dweights_N.numpy(),
            of_gate=gate,
            of_up=up,
            of_down=down,
            adds=(of_gate, of_up, of_down),
            threads=torch.get_num_threads(),
        )
        return Gradients(dx_NH, dweights_N, left)

    def _read(self, inputs: Inputs, projections: Projections) -> dict[str, Any]:
        """What both passes read."""
        assert projections.gate is not None
        return {
            "gate": _bits(projections.gate),
            "up": _bits(projections.up),
            "down": _bits(projections.down),
            "x": _bits(inputs.x),
            "rows": inputs.rows.contiguous().numpy(),
            "weights": inputs.weights.detach().contiguous().numpy(),
            "counts": self._counts,
            "activation": inputs.formula.activation.swiglu,
            "unit": self._unit,
        }


def _bits(tensor: Tensor) -> NDArray[np.int16]:
    """The bits of bfloat16, row by row; NumPy has no such numbers."""
    return tensor.detach().contiguous().view(torch.int16).numpy()


def _optional(tensor: Tensor | None) -> NDArray[np.int16] | None:
    return None if tensor is None else _bits(tensor)
