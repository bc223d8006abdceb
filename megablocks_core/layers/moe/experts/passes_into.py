"""Passes over one expert's rows, into buffers that the next expert uses too.

The extension does each in one pass for SwiGLU (``cpp/expert_rows.hpp``), in float32 or bfloat16 on
a CPU; the plain twins take whatever torch does.

Dimensions: n rows of an expert, p those and padding, i features here.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megablocks_core.layers.moe.experts.activations import Activation
from megablocks_core.layers.moe.experts.passes import HiddenGradients, hidden, hidden_backward

try:
    import megablocks_core._native as _native
except ModuleNotFoundError:  # a pure wheel; an extension that is there and broken still raises
    _native = None


def hidden_into(
    activation: Activation,
    gate_ni: Tensor | None,
    up_ni: Tensor,
    weights_n: Tensor | None,
    out_pi: Tensor,
) -> None:
    """``hidden`` of the rows there are; the others of ``out`` become zeros."""
    if _native is None or not _fits(activation, up_ni, weights_n) or gate_ni is None:
        return hidden_into_plain(activation, gate_ni, up_ni, weights_n, out_pi)
    assert activation.swiglu is not None
    _native.hidden_rows(
        _bits(gate_ni),
        _bits(up_ni),
        weights=_floats(weights_n),
        activation=activation.swiglu,
        out=_bits(out_pi),
        threads=torch.get_num_threads(),
    )


def hidden_backward_into(
    activation: Activation,
    dh_pi: Tensor,
    gate_ni: Tensor | None,
    up_ni: Tensor,
    weights_n: Tensor | None,
    out: HiddenGradients,
) -> None:
    """``hidden_backward`` of the rows there are; the others of ``out`` [p i] become zeros."""
    if _native is None or not _fits(activation, up_ni, weights_n) or gate_ni is None:
        return hidden_backward_into_plain(activation, dh_pi, gate_ni, up_ni, weights_n, out)
    assert activation.swiglu is not None and out.gate is not None
    _native.hidden_gradients(
        _bits(gate_ni),
        _bits(up_ni),
        weights=_floats(weights_n),
        activation=activation.swiglu,
        of_hidden=_bits(dh_pi),
        hidden=_bits(out.hidden),
        of_gate=_bits(out.gate),
        of_up=_bits(out.up),
        of_weights=_floats(None if weights_n is None else out.weights),
        threads=torch.get_num_threads(),
    )


def hidden_into_plain(
    activation: Activation,
    gate_ni: Tensor | None,
    up_ni: Tensor,
    weights_n: Tensor | None,
    out_pi: Tensor,
) -> None:
    """``hidden_into`` by torch."""
    count = up_ni.shape[0]
    out_pi[:count] = hidden(activation, gate_ni, up_ni, weights_n)
    out_pi[count:].zero_()


def hidden_backward_into_plain(
    activation: Activation,
    dh_pi: Tensor,
    gate_ni: Tensor | None,
    up_ni: Tensor,
    weights_n: Tensor | None,
    out: HiddenGradients,
) -> None:
    """``hidden_backward_into`` by torch."""
    count = up_ni.shape[0]
    made = hidden_backward(activation, dh_pi[:count], gate_ni, up_ni, weights_n)
    for out_pi, rows_ni in zip(out[:3], made[:3], strict=True):
        if out_pi is not None and rows_ni is not None:
            out_pi[:count] = rows_ni
            out_pi[count:].zero_()
    if made.weights is not None and out.weights is not None:
        out.weights.copy_(made.weights)


def _fits(activation: Activation, up_ni: Tensor, weights_n: Tensor | None) -> bool:
    """Whether the extension takes these rows."""
    known = up_ni.dtype in (torch.float32, torch.bfloat16) and up_ni.device.type == "cpu"
    weighs = weights_n is None or (weights_n.dtype == torch.float32 and weights_n.is_contiguous())
    return known and weighs and activation.swiglu is not None


def _bits(rows_ni: Tensor) -> NDArray[np.float32 | np.int16]:
    """The rows, those of bfloat16 as integers; NumPy has no such numbers."""
    rows_ni = rows_ni.detach()
    return (rows_ni.view(torch.int16) if rows_ni.dtype == torch.bfloat16 else rows_ni).numpy()


def _floats(weights_n: Tensor | None) -> NDArray[np.float32]:
    return np.empty(0, np.float32) if weights_n is None else weights_n.detach().numpy()
