"""The selective scan within chunks (Gu and Dao, https://arxiv.org/abs/2312.00752, section 3.3).

Every channel and feature of the state decays by itself, so there are no matrix products: one chunk
is computed after the other, token by token. Constants are A and, where there is one, D.

Dimensions: B rows, n chunks, Q tokens of a chunk, D channels, N features of a state.
"""

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
from megablocks_core.layers.ssm.functions.selective.passes import chunk_backward, chunk_forward


def _chunk(inputs: Tensors, index: int) -> list[Tensor]:
    return [x[:, index] for x in inputs]


def _forward(
    inputs: Tensors, constants: Tensors, state: Tensor, way: Way, outputs: bool
) -> tuple[Tensor | None, Tensors]:
    A_DN, *skip = constants
    found, behind = [], []
    for index in range(inputs[0].shape[1]):
        before = way.enter(index, state)
        y, state = chunk_forward(_chunk(inputs, index), A_DN, before, outputs=outputs)
        behind.append(state)
        if y is not None:
            found.append(y)
    if not outputs:
        return None, behind
    y = torch.stack(found, dim=1)
    for D in skip:
        y.addcmul_(inputs[0], D)
    return y, behind


def _backward(
    inputs: Tensors,
    constants: Tensors,
    state: Tensor,
    way: WayBack,
    dy: Tensor | None,
    dstate: Tensor,
) -> tuple[Tensors, Tensors, Tensor]:
    A_DN, *skip = constants
    count = inputs[0].shape[1]
    before = [way.enter(0, state)]
    for index in range(count - 1):
        behind = chunk_forward(_chunk(inputs, index), A_DN, before[-1], outputs=False)[1]
        before.append(way.enter(index + 1, behind))
    grads = [torch.empty_like(x) for x in inputs]
    dA_DN = torch.zeros_like(A_DN)
    for index in reversed(range(count)):
        given = None if dy is None else dy[:, index]
        found = chunk_backward(
            _chunk(inputs, index), A_DN, before.pop(), given, way.behind(index, dstate)
        )
        for whole, grad in zip(grads, found.inputs, strict=True):
            whole[:, index] = grad
        dA_DN += found.A_DN
        dstate = way.before(index, found.state)
    of_skip = [torch.zeros_like(D) for D in skip]
    if dy is not None:
        for D, dD in zip(skip, of_skip, strict=True):
            grads[0].addcmul_(dy, D)
            dD.add_((dy * inputs[0]).sum((0, 1, 2)))
    return grads, [dA_DN, *of_skip], dstate


def _state_map(
    scan: Scan, inputs: Tensors, constants: Tensors, like: Tensor, borders: Any
) -> tuple[Tensor, Tensor]:
    state = scan(NAME, inputs, constants[:1], torch.zeros_like(like), borders, outputs=False)[1]
    total = inputs[1].to(like.dtype).sum((1, 2))[..., None]
    if borders.first is None:
        return torch.exp(total * constants[0].to(like.dtype)), state
    # Masked before and behind exp: what another document's tokens give must not come back.
    started = borders.first.any()
    total = torch.where(started, 0, total)
    return torch.where(started, 0, torch.exp(total * constants[0].to(like.dtype))), state


NAME = "selective"
register(NAME, Recurrence(0, _forward, _backward, _state_map, torch.mul))
