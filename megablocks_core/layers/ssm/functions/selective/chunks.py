"""The selective scan within chunks (Gu and Dao, https://arxiv.org/abs/2312.00752, section 3.3).

Every channel and feature of the state decays by itself, so there are no matrix products: the
steps of all chunks are made side by side, first from zero states, then from those before each.

Dimensions: B rows, n chunks, Q tokens of a chunk, D channels, N features of a state.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megablocks_core.layers.ssm.functions.chunked.recurrence import Recurrence, Tensors
from megablocks_core.layers.ssm.functions.chunked.scan import register


def _step(state: Tensor, x: Tensor, dt: Tensor, B: Tensor, A_DN: Tensor) -> Tensor:
    """The states [B n D N] behind one token of every chunk."""
    return torch.exp(dt[..., None] * A_DN) * state + (dt * x)[..., None] * B[..., None, :]


def _tokens(*inputs: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """What each token of a chunk has; one split, so that backward stacks and does not add."""
    return zip(*(x.unbind(2) for x in inputs), strict=True)


def _prepare(inputs: Tensors, constants: Tensors) -> tuple[Tensor, ...]:
    """Transitions and additions [B n D N]."""
    x, dt, B, _ = inputs
    (A_DN,) = constants
    state = x.new_zeros((*x.shape[:2], *A_DN.shape))
    for token in _tokens(x, dt, B):
        state = _step(state, *token, A_DN)
    return torch.exp(dt.sum(2)[..., None] * A_DN), state


def _outputs(states: Tensor, _: Tensors, inputs: Tensors, constants: Tensors) -> Tensor:
    (A_DN,) = constants
    outputs, state = [], states
    for x, dt, B, C in _tokens(*inputs):
        state = _step(state, x, dt, B, A_DN)
        outputs.append((state @ C[..., None]).squeeze(-1))
    return torch.stack(outputs, dim=2)


NAME = "selective"
register(NAME, Recurrence(_prepare, _outputs, torch.mul, torch.ones_like))
