"""The gated delta rule within chunks (Yang et al., https://arxiv.org/abs/2412.06464, section 3.3).

Within a chunk with decays ``a_ij = exp(g_j+1 + ... + g_i)`` the state is
``s_i = a_i0 s_0 + sum_j a_ij k_j u_j^T``, where ``u_j = beta_j (v_j - a_j0 k_j^T s_0 - sum_l<j a_jl
(k_j k_l) u_l)`` is what token j writes in place of what its key recalls. All u of a chunk solve one
triangular system: ``u = u0 - w s_0``.

Dimensions: B rows, n chunks, Q tokens of a chunk, H heads, K and V features of keys and values.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from megablocks_core.layers.ssm.functions.chunked.recurrence import (
    Recurrence,
    Scan,
    Tensors,
    Way,
    WayBack,
)
from megablocks_core.layers.ssm.functions.chunked.scan import register
from megablocks_core.layers.ssm.functions.delta.decays import decays_backward, decays_of


class Chunks(NamedTuple):
    """What chunks have before their states are known.

    Attributes:
        carried: Decays from the state before the chunk to each token [B n H Q].
        between: Decays between tokens, zero above the diagonal [B n H Q Q].
        keys: Products of keys [B n H Q Q].
        u0: What is written if the state is zero [B n H Q V].
        w: What less is written, for a state [B n H Q K].
        written: Keys with the decay to the chunk's end [B n H Q K].
        transitions: From the state before to the one behind [B n H K K].
        additions: The state behind if the one before is zero [B n H K V].
    """

    carried: Tensor
    between: Tensor
    keys: Tensor
    u0: Tensor
    w: Tensor
    written: Tensor
    transitions: Tensor
    additions: Tensor


def _by_head(inputs: Tensors) -> list[Tensor]:
    """Inputs [B n Q H ...] as [B n H Q ...]."""
    return [x.transpose(2, 3) for x in inputs]


def _solve(system: Tensor, sides: Tensor, *, upper: bool = False) -> Tensor:
    """Of a triangular system whose diagonal is taken as ones."""
    return torch.linalg.solve_triangular(system, sides, upper=upper, unitriangular=True)


def _prepared(k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Chunks, Tensor]:
    """What chunks have, and their systems [B n H Q Q]."""
    carried, between = decays_of(g)
    keys = k @ k.mT
    system = (keys * between * beta[..., None]).tril(-1)
    sides = beta[..., None] * torch.cat((v, carried[..., None] * k), dim=-1)
    u0, w = _solve(system, sides).split([v.shape[-1], k.shape[-1]], dim=-1)
    written = k * between[..., -1, :, None]
    whole = torch.diag_embed(carried[..., -1:].expand(*carried.shape[:-1], k.shape[-1]))
    transitions = whole - written.mT @ w
    chunks = Chunks(carried, between, keys, u0, w, written, transitions, written.mT @ u0)
    return chunks, system


def _pass(chunks: Chunks, state: Tensor, way: Way) -> tuple[Tensor, Tensors]:
    """The states before every chunk [B n H K V], and behind each."""
    before, behind = [], []
    for index in range(chunks.transitions.shape[1]):
        before.append(way.enter(index, state))
        state = chunks.transitions[:, index] @ before[-1] + chunks.additions[:, index]
        behind.append(state)
    return torch.stack(before, dim=1), behind


def _forward(
    inputs: Tensors, _: Tensors, state: Tensor, way: Way, outputs: bool
) -> tuple[Tensor | None, Tensors]:
    q, k, *others = _by_head(inputs)
    chunks, _system = _prepared(k, *others)
    states, behind = _pass(chunks, state, way)
    if not outputs:
        return None, behind
    u = chunks.u0 - chunks.w @ states
    o = chunks.carried[..., None] * (q @ states) + ((q @ k.mT) * chunks.between) @ u
    return o.transpose(2, 3), behind


def _backward(
    inputs: Tensors,
    _: Tensors,
    state: Tensor,
    way: WayBack,
    dy: Tensor | None,
    dstate: Tensor,
) -> tuple[Tensors, Tensors, Tensor]:
    q, k, v, g, beta = _by_head(inputs)
    chunks, system = _prepared(k, v, g, beta)
    states, _behind = _pass(chunks, state, way)
    grads = _Gradients(chunks)
    dq, dk, dstates = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(states)
    if dy is not None:
        dq, dk, dstates = _outputs_backward(dy.transpose(2, 3), q, k, chunks, states, grads)
    dtransitions, dadditions, dstate = _pass_backward(chunks, states, dstates, way, dstate)
    more, dv, dbeta = _prepare_backward(
        (k, v, beta), chunks, system, (dtransitions, dadditions), grads
    )
    dg = decays_backward(chunks.carried, chunks.between, grads.carried, grads.between)
    return _by_head((dq, dk + more, dv, dg, dbeta)), (), dstate


class _Gradients:
    """Those of what chunks have, summed as they are found."""

    def __init__(self, chunks: Chunks) -> None:
        self.carried, self.between, self.u0, self.w = (
            torch.zeros_like(x) for x in (chunks.carried, chunks.between, chunks.u0, chunks.w)
        )


def _outputs_backward(
    do: Tensor, q: Tensor, k: Tensor, chunks: Chunks, states: Tensor, grads: _Gradients
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and the states before chunks."""
    met = q @ k.mT
    u = chunks.u0 - chunks.w @ states
    du = (met * chunks.between).mT @ do
    dmet = do @ u.mT
    grads.u0 += du
    grads.w -= du @ states.mT
    grads.carried += (do * (q @ states)).sum(-1)
    grads.between += dmet * met
    dmet = dmet * chunks.between
    recalled = chunks.carried[..., None] * do
    dq = recalled @ states.mT + dmet @ k
    return dq, dmet.mT @ q, q.mT @ recalled - chunks.w.mT @ du


def _pass_backward(
    chunks: Chunks, states: Tensor, dstates: Tensor, way: WayBack, dstate: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of transitions, additions, and the state before the first chunk."""
    dadditions = torch.empty_like(states)
    for index in reversed(range(states.shape[1])):
        dadditions[:, index] = way.behind(index, dstate)
        passed = chunks.transitions[:, index].mT @ dadditions[:, index]
        dstate = way.before(index, passed + dstates[:, index])
    return dadditions @ states.mT, dadditions, dstate


def _prepare_backward(
    inputs: Tensors, chunks: Chunks, system: Tensor, given: Tensors, grads: _Gradients
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of k, v and beta; the decays' are added to ``grads``."""
    (k, v, beta), (dtransitions, dadditions) = inputs, given
    dwritten = chunks.u0 @ dadditions.mT - chunks.w @ dtransitions.mT
    du0 = grads.u0 + chunks.written @ dadditions
    dw = grads.w - chunks.written @ dtransitions
    grads.carried[..., -1] += dtransitions.diagonal(dim1=-2, dim2=-1).sum(-1)
    grads.between[..., -1, :] += (dwritten * k).sum(-1)
    dk = dwritten * chunks.between[..., -1, :, None]
    dsides = _solve(system.mT, torch.cat((du0, dw), dim=-1), upper=True)
    dsystem = -(dsides @ torch.cat((chunks.u0, chunks.w), dim=-1).mT).tril(-1)
    dvalues, dkeys = dsides.split([v.shape[-1], k.shape[-1]], dim=-1)
    along = (dkeys * k).sum(-1)
    unscaled = dsystem * chunks.keys
    dbeta = (dvalues * v).sum(-1) + chunks.carried * along + (unscaled * chunks.between).sum(-1)
    grads.carried += beta * along
    grads.between += unscaled * beta[..., None]
    products = dsystem * chunks.between * beta[..., None]
    dk += (beta * chunks.carried)[..., None] * dkeys + (products + products.mT) @ k
    return dk, beta[..., None] * dvalues, dbeta


def _state_map(
    scan: Scan, inputs: Tensors, constants: Tensors, like: Tensor, borders: Any
) -> tuple[Tensor, Tensor]:
    """Values of more features, to which nothing is added, carry the identity to the transition."""
    q, k, v, *others = inputs
    keys, values = like.shape[-2:]
    eye = torch.eye(keys, dtype=like.dtype, device=like.device).expand(*like.shape[:-1], keys)
    carry = torch.cat((torch.zeros_like(like), eye), dim=-1)
    if borders.initial is not None:
        borders = borders._replace(initial=pad(borders.initial, (0, keys)))
    inputs = (q, k, pad(v, (0, keys)), *others)
    both = scan(NAME, inputs, constants, carry, borders, outputs=False)[1]
    state, transition = both.split([values, keys], dim=-1)
    return transition, state


NAME = "gated_delta"
register(NAME, Recurrence(2, _forward, _backward, _state_map, torch.matmul))
