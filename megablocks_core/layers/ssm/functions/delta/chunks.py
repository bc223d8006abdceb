"""The gated delta rule within chunks (Yang et al., https://arxiv.org/abs/2412.06464, section 3.3).

Within a chunk with decays ``a_ij = exp(g_j+1 + ... + g_i)`` the state is
``s_i = a_i0 s_0 + sum_j a_ij k_j u_j^T``, where ``u_j = beta_j (v_j - a_j0 k_j^T s_0 - sum_l<j a_jl
(k_j k_l) u_l)`` is what token j writes in place of what its key recalls. All u of a chunk solve one
triangular system: ``u = u0 - w s_0``.

Dimensions: B rows, n chunks, Q tokens of a chunk, H heads, K and V features of keys and values.
"""

import torch
from torch import Tensor

from megablocks_core.layers.ssm.functions.chunked.recurrence import Recurrence, Tensors
from megablocks_core.layers.ssm.functions.chunked.scan import register


def _decays(g_BnHQ: Tensor) -> tuple[Tensor, Tensor]:
    """From the state before the chunk to each token, and between tokens [B n H Q Q].

    Logarithms between two tokens are summed for themselves: a difference of long sums would
    lose what is small beside them.
    """
    count = g_BnHQ.shape[-1]
    later = torch.ones(count, count, dtype=torch.bool, device=g_BnHQ.device).tril(-1)
    sums = g_BnHQ[..., :, None].where(later, 0).cumsum(-2)
    between = sums.masked_fill(later.mT, -torch.inf).exp()
    return g_BnHQ.cumsum(-1).exp(), between


def _by_head(inputs: Tensors) -> tuple[Tensor, ...]:
    """Inputs [B n Q H ...] as [B n H Q ...]."""
    return tuple(x.transpose(2, 3) for x in inputs)


def _prepare(inputs: Tensors, _: Tensors) -> tuple[Tensor, ...]:
    """Transitions [B n H K K], additions [B n H K V], u0 [B n H Q V] and w [B n H Q K]."""
    _q, k, v, g, beta = _by_head(inputs)
    carried, between = _decays(g)
    system = ((k @ k.mT) * between * beta[..., None]).tril(-1)
    sides = beta[..., None] * torch.cat((v, carried[..., None] * k), dim=-1)
    # The diagonal is taken as ones.
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    u0, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    written = (k * between[..., -1, :, None]).mT
    whole = carried[..., -1, None, None] * torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    return whole - written @ w, written @ u0, u0, w


def _outputs(states: Tensor, further: Tensors, inputs: Tensors, _: Tensors) -> Tensor:
    q, k, _v, g, _beta = _by_head(inputs)
    u0, w = further
    carried, between = _decays(g)
    recalled = carried[..., None] * (q @ states)
    return (recalled + ((q @ k.mT) * between) @ (u0 - w @ states)).transpose(2, 3)


def _identity(transition: Tensor) -> Tensor:
    eye = torch.eye(transition.shape[-1], dtype=transition.dtype, device=transition.device)
    return eye.expand_as(transition)


NAME = "gated_delta"
register(NAME, Recurrence(_prepare, _outputs, torch.matmul, _identity))
