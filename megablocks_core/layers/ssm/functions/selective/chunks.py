"""The selective scan within chunks (Gu and Dao, https://arxiv.org/abs/2312.00752, section 3.3).

Every channel and feature of the state decays by itself, so there are no matrix products. Of one
chunk after the other decays and additions of all tokens are made at once; then each token costs
one operation, there and back.

Dimensions: B rows, n chunks, Q tokens of a chunk, D channels, N features of a state.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from megablocks_core.layers.ssm.functions.chunked.recurrence import (
    Recurrence,
    Scan,
    Tensors,
    Way,
    WayBack,
)
from megablocks_core.layers.ssm.functions.chunked.scan import register


def _chunk(inputs: Tensors, index: int) -> list[Tensor]:
    return [x[:, index] for x in inputs]


def _states(x: Tensor, dt: Tensor, B: Tensor, A_DN: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Decays and states of every token of a chunk [B Q D N]."""
    decays = (dt[..., None] * A_DN).exp_()
    states = (dt * x)[..., None] * B[:, :, None]
    _run(state, decays.unbind(1), states.unbind(1))
    return decays, states


def _run(state: Tensor, decays: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """``values = decays * the one before + values``, in place."""
    for decay, value in zip(decays, values, strict=True):
        state = value.addcmul_(decay, state)


def _forward(
    inputs: Tensors, constants: Tensors, state: Tensor, way: Way, outputs: bool
) -> tuple[Tensor | None, Tensors]:
    (A_DN,) = constants
    found, behind = [], []
    for index in range(inputs[0].shape[1]):
        x, dt, B, C = _chunk(inputs, index)
        _, states = _states(x, dt, B, A_DN, way.enter(index, state))
        if outputs:
            found.append((states @ C[..., None]).squeeze(-1))
        state = states[:, -1].clone()
        behind.append(state)
    return (torch.stack(found, dim=1) if outputs else None), behind


def _backward(
    inputs: Tensors,
    constants: Tensors,
    state: Tensor,
    way: WayBack,
    dy: Tensor | None,
    dstate: Tensor,
) -> tuple[Tensors, Tensors, Tensor]:
    (A_DN,) = constants
    count = inputs[0].shape[1]
    before = [way.enter(0, state)]
    for index in range(count - 1):
        x, dt, B, _ = _chunk(inputs, index)
        states = _states(x, dt, B, A_DN, before[-1])[1]
        before.append(way.enter(index + 1, states[:, -1].clone()))
    grads = [torch.empty_like(x) for x in inputs]
    dA_DN = torch.zeros_like(A_DN)
    for index in reversed(range(count)):
        given = None if dy is None else dy[:, index]
        found, more_DN, dstate = _chunk_backward(
            _chunk(inputs, index), A_DN, before.pop(), given, way.behind(index, dstate)
        )
        for whole, grad in zip(grads, found, strict=True):
            whole[:, index] = grad
        dA_DN += more_DN
        dstate = way.before(index, dstate)
    return grads, [dA_DN], dstate


def _chunk_backward(
    inputs: Tensors, A_DN: Tensor, state: Tensor, dy: Tensor | None, dstate: Tensor
) -> tuple[Tensors, Tensor, Tensor]:
    """Gradients of one chunk's inputs, of ``A`` and of the state before."""
    x, dt, B, C = inputs
    decays, states = _states(x, dt, B, A_DN, state)
    if dy is None:
        dstates, dC = torch.zeros_like(states), torch.zeros_like(C)
    else:
        dstates = dy[..., None] * C[:, :, None]
        dC = (dy[:, :, None] @ states).squeeze(-2)
    # The gradient of a state: its own, and that of the next one times the next one's decay.
    dstates[:, -1] += dstate
    _run(dstates[:, -1], decays[:, 1:].flip(1).unbind(1), dstates[:, :-1].unbind(1)[::-1])
    dB = ((dt * x)[:, :, None] @ dstates).squeeze(-2)
    written = (dstates @ B[..., None]).squeeze(-1)
    # From here on ``decays`` are the gradients of their logarithms.
    decays *= dstates
    dstate = decays[:, 0].clone()
    decays[:, 0] *= state
    decays[:, 1:] *= states[:, :-1]
    ddt = written * x + (decays * A_DN).sum(-1)
    dA_DN = torch.einsum("bqdn,bqd->dn", decays, dt)
    return (written * dt, ddt, dB, dC), dA_DN, dstate


def _state_map(
    scan: Scan, inputs: Tensors, constants: Tensors, like: Tensor, borders: Any
) -> tuple[Tensor, Tensor]:
    state = scan(NAME, inputs, constants, torch.zeros_like(like), borders, outputs=False)[1]
    total = inputs[1].to(like.dtype).sum((1, 2))[..., None]
    if borders.first is None:
        return torch.exp(total * constants[0].to(like.dtype)), state
    # Masked before and behind exp: what another document's tokens give must not come back.
    started = borders.first.any()
    total = torch.where(started, 0, total)
    return torch.where(started, 0, torch.exp(total * constants[0].to(like.dtype))), state


NAME = "selective"
register(NAME, Recurrence(0, _forward, _backward, _state_map, torch.mul))
