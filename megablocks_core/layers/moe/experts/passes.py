"""What is done to rows between the products of experts: hidden activations and their gradients.

Dimensions: N places, i features here, H hidden size, M rows, k at most so many places a row.
"""

from typing import NamedTuple

from torch import Tensor

from megablocks_core.layers.moe.experts.activations import Activation


class HiddenGradients(NamedTuple):
    """What backward makes of the gradient of the weighted hidden activation.

    Attributes:
        hidden: The weighted hidden activation again [N i].
        gate: Gradient of the gate [N i], if there is one.
        up: Gradient of up [N i].
        weights: Gradient of the weights [N], if they were given.
    """

    hidden: Tensor
    gate: Tensor | None
    up: Tensor
    weights: Tensor | None


def hidden(
    activation: Activation, gate_Ni: Tensor | None, up_Ni: Tensor, weights_N: Tensor | None
) -> Tensor:
    """The hidden activation [N i], times the weights if given."""
    hidden_Ni = activation.forward(gate_Ni, up_Ni)
    return hidden_Ni if weights_N is None else scaled(hidden_Ni, weights_N)


def hidden_backward(
    activation: Activation,
    dh_Ni: Tensor,
    gate_Ni: Tensor | None,
    up_Ni: Tensor,
    weights_N: Tensor | None,
) -> HiddenGradients:
    """The backward of ``hidden``, and the activation again."""
    hidden_Ni, dweights_N = activation.forward(gate_Ni, up_Ni), None
    if weights_N is not None:
        dweights_N = row_products(dh_Ni, hidden_Ni, weights_N)
        hidden_Ni, dh_Ni = scaled(hidden_Ni, weights_N), scaled(dh_Ni, weights_N)
    dgate_Ni, dup_Ni = activation.backward(dh_Ni, gate_Ni, up_Ni)
    return HiddenGradients(hidden_Ni, dgate_Ni, dup_Ni, dweights_N)


def scaled(rows_NF: Tensor, weights_N: Tensor) -> Tensor:
    """Each row times its weight, in the rows' dtype."""
    return (rows_NF * weights_N.unsqueeze(-1)).to(rows_NF.dtype)


def row_products(one_NF: Tensor, other_NF: Tensor, like_N: Tensor) -> Tensor:
    """The inner product of each pair of rows [N], in the dtype of the weights."""
    return (one_NF.to(like_N.dtype) * other_NF).sum(-1).to(like_N.dtype)
