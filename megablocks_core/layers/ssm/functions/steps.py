"""One token of each state-space function: how decoding goes on, and what the recurrences loop over.

States and decays are at least float32 (float64 for float64 inputs); what is given out has the
dtype of the input. Nothing is changed in place: a state that was handed in stays as it is.

Dimensions: B rows, C channels, W taps of a convolution, D channels of Mamba-1, H heads,
P features of a head, G groups of heads, N features of a state, K and V features of keys and
values.
"""

import torch
from torch import Tensor
from torch.nn.functional import silu

from megablocks_core.layers.ssm.functions.arguments import (
    check_dims,
    check_groups_of_heads,
    check_shapes,
)
from megablocks_core.parallel.checks import check_tensors


def wide(*tensors: Tensor) -> torch.dtype:
    """The dtype of states: float64 if an input is, else float32."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def causal_conv1d_step(
    x_BC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None = None,
    *,
    state: Tensor,
    activation: bool = False,
) -> tuple[Tensor, Tensor]:
    """The next output [B C] of a causal depthwise convolution, and the next state.

    Args:
        x_BC: Input of one token.
        weight_CW: Taps, the last of which is the token's own.
        bias_C: Added to every output.
        state: The W - 1 inputs before the token, oldest first [B W-1 C].
        activation: The output passes through SiLU.

    Raises:
        ValueError: Shapes do not fit.
    """
    check_tensors(state=state)
    check_dims(weight=(weight_CW, 2), x=(x_BC, 2))
    (rows, channels), width = x_BC.shape, weight_CW.shape[1]
    check_shapes(
        weight=(weight_CW, (channels, width)),
        bias=(bias_C, (channels,)),
        state=(state, (rows, width - 1, channels)),
    )
    window_BWC = torch.cat((state, x_BC[:, None].to(state.dtype)), dim=1)
    y_BC = (window_BWC.to(wide(x_BC)) * weight_CW.t()).sum(1)
    y_BC = y_BC if bias_C is None else y_BC + bias_C
    return (silu(y_BC) if activation else y_BC).to(x_BC.dtype), window_BWC[:, 1:]


def selective_step(
    x_BD: Tensor,
    dt_BD: Tensor,
    A_DN: Tensor,
    B_BN: Tensor,
    C_BN: Tensor,
    *,
    D: Tensor | None = None,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """``s = exp(dt A) s + dt x B``; ``y = s C + D x`` (Mamba, arXiv:2312.00752, section 3.2).

    Args:
        x_BD: Input of one token.
        dt_BD: Step size, after softplus.
        A_DN: Negative rates of decay.
        B_BN: Input matrix.
        C_BN: Output matrix.
        D: Weight of the input in the output [D].
        state: [B D N].

    Returns:
        ``y`` [B D] and the next state.

    Raises:
        ValueError: Shapes do not fit.
    """
    check_tensors(state=state)
    check_dims(x=(x_BD, 2), A=(A_DN, 2))
    (rows, channels), states = x_BD.shape, A_DN.shape[1]
    check_shapes(
        dt=(dt_BD, (rows, channels)),
        A=(A_DN, (channels, states)),
        B=(B_BN, (rows, states)),
        C=(C_BN, (rows, states)),
        D=(D, (channels,)),
        state=(state, (rows, channels, states)),
    )
    kind = wide(x_BD, state)
    x, dt = x_BD.to(kind), dt_BD.to(kind)
    decay_BDN = torch.exp(dt[..., None] * A_DN.to(kind))
    state = decay_BDN * state + (dt * x)[..., None] * B_BN.to(kind)[:, None]
    y_BD = (state * C_BN.to(kind)[:, None]).sum(-1)
    y_BD = y_BD if D is None else y_BD + D.to(kind) * x
    return y_BD.to(x_BD.dtype), state


def ssd_step(
    x_BHP: Tensor,
    dt_BH: Tensor,
    A_H: Tensor,
    B_BGN: Tensor,
    C_BGN: Tensor,
    *,
    D: Tensor | None = None,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """``s = exp(dt A) s + dt x B^T``; ``y = s C + D x`` of every head (Mamba-2, arXiv:2405.21060).

    Args:
        x_BHP: Input of one token.
        dt_BH: Step size, after softplus.
        A_H: Negative rate of decay.
        B_BGN: Input matrix of each group of H / G neighbouring heads.
        C_BGN: Output matrix of each group.
        D: Weight of the input in the output [H], or of each feature [H P].
        state: [B H P N].

    Returns:
        ``y`` [B H P] and the next state.

    Raises:
        ValueError: Shapes do not fit.
    """
    check_tensors(state=state)
    check_dims(x=(x_BHP, 3), B=(B_BGN, 3))
    (rows, heads, features), (groups, states) = x_BHP.shape, B_BGN.shape[1:]
    check_groups_of_heads(groups, heads)
    check_shapes(
        dt=(dt_BH, (rows, heads)),
        A=(A_H, (heads,)),
        B=(B_BGN, (rows, groups, states)),
        C=(C_BGN, (rows, groups, states)),
        D=(D, (heads,) if D is None or D.dim() == 1 else (heads, features)),
        state=(state, (rows, heads, features, states)),
    )
    kind = wide(x_BHP, state)
    x, dt = x_BHP.to(kind), dt_BH.to(kind)
    served = heads // groups
    B_BHN, C_BHN = (part.to(kind).repeat_interleave(served, dim=1) for part in (B_BGN, C_BGN))
    decay_BH = torch.exp(dt * A_H.to(kind))
    state = decay_BH[..., None, None] * state + (dt[..., None] * x)[..., None] * B_BHN[:, :, None]
    y_BHP = (state @ C_BHN[..., None]).squeeze(-1)
    if D is not None:
        y_BHP = y_BHP + (D if D.dim() == 2 else D[:, None]).to(kind) * x
    return y_BHP.to(x_BHP.dtype), state


def gated_delta_step(
    q_BHK: Tensor,
    k_BHK: Tensor,
    v_BHV: Tensor,
    g_BH: Tensor,
    beta_BH: Tensor,
    *,
    scale: float | None = None,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """``s = exp(g) s``; ``s = s + k (beta (v - k^T s))^T``; ``o = scale q^T s``.

    Gated delta networks, arXiv:2412.06464, section 3.

    Args:
        q_BHK: Query of one token.
        k_BHK: Key, of length 1 if the state shall not grow.
        v_BHV: Value.
        g_BH: Logarithm of the decay, at most 0.
        beta_BH: How much of what the key recalls is replaced.
        scale: Of the output; default 1 / sqrt(K).
        state: [B H K V].

    Returns:
        ``o`` [B H V] and the next state.

    Raises:
        ValueError: Shapes do not fit.
    """
    check_tensors(state=state)
    check_dims(q=(q_BHK, 3), v=(v_BHV, 3))
    (rows, heads, keys), values = q_BHK.shape, v_BHV.shape[2]
    check_shapes(
        k=(k_BHK, (rows, heads, keys)),
        v=(v_BHV, (rows, heads, values)),
        g=(g_BH, (rows, heads)),
        beta=(beta_BH, (rows, heads)),
        state=(state, (rows, heads, keys, values)),
    )
    kind = wide(q_BHK, state)
    q, k, v, g, beta = (part.to(kind) for part in (q_BHK, k_BHK, v_BHV, g_BH, beta_BH))
    state = torch.exp(g)[..., None, None] * state
    recalled_BHV = (k[..., None, :] @ state).squeeze(-2)
    state = state + k[..., None] * (beta[..., None] * (v - recalled_BHV))[..., None, :]
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    return (factor * (q[..., None, :] @ state).squeeze(-2)).to(q_BHK.dtype), state
