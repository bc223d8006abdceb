"""Passes over the tokens of one chunk, there and back.

The extension does each in one pass for a tile of channels, on a CPU (``cpp/selective_chunk.hpp``);
the plain twins make decays and additions of all tokens at once, then one operation a token.

Dimensions: B rows, Q tokens of a chunk, D channels, N features of a state.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megablocks_core.layers.ssm.functions.chunked.recurrence import Tensors

try:
    import megablocks_core._native as _native
except ModuleNotFoundError:  # a pure wheel; an extension that is there and broken still raises
    _native = None


class ChunkGradients(NamedTuple):
    """Gradients of x, dt, B and C, of ``A`` and of the states before the chunk."""

    inputs: Tensors
    A_DN: Tensor
    state: Tensor


def chunk_forward(
    inputs: Tensors, A_DN: Tensor, state: Tensor, *, outputs: bool
) -> tuple[Tensor | None, Tensor]:
    """Outputs [B Q D], if they are asked for, and the states behind [B D N].

    Args:
        inputs: x and dt [B Q D], B and C [B Q N], of the dtype of states.
        A_DN: Rates.
        state: Before the chunk [B D N].
        outputs: Whether they are asked for.
    """
    if _native is None or not _fits(state):
        return chunk_forward_plain(inputs, A_DN, state, outputs=outputs)
    y, behind = _room(inputs[0]), _room(state)
    for row in range(len(state)):
        _native.selective_chunk(
            *_arrays(*(x[row] for x in inputs), A_DN, state[row]),
            y=y[row].numpy() if outputs else None,
            behind=behind[row].numpy(),
            threads=torch.get_num_threads(),
        )
    return (y if outputs else None), behind


def chunk_backward(
    inputs: Tensors, A_DN: Tensor, state: Tensor, dy: Tensor | None, dstate: Tensor
) -> ChunkGradients:
    """Gradients of a chunk, from those of outputs [B Q D] and of the states behind [B D N]."""
    if _native is None or not _fits(state):
        return chunk_backward_plain(inputs, A_DN, state, dy, dstate)
    grads = [_room(x) for x in inputs]
    dA_DN, before = torch.zeros(A_DN.shape, dtype=A_DN.dtype), _room(state)
    for row in range(len(state)):
        names = ("of_x", "of_dt", "of_B", "of_C")
        of_inputs = {name: x[row].numpy() for name, x in zip(names, grads, strict=True)}
        _native.selective_chunk_gradients(
            *_arrays(*(x[row] for x in inputs), A_DN, state[row]),
            of_y=None if dy is None else _arrays(dy[row])[0],
            of_behind=_arrays(dstate[row])[0],
            **of_inputs,
            of_A=dA_DN.numpy(),
            of_state=before[row].numpy(),
            threads=torch.get_num_threads(),
        )
    return ChunkGradients(grads, dA_DN, before)


def chunk_forward_plain(
    inputs: Tensors, A_DN: Tensor, state: Tensor, *, outputs: bool
) -> tuple[Tensor | None, Tensor]:
    """``chunk_forward`` by torch."""
    x, dt, B, C = inputs
    _, states = _states(x, dt, B, A_DN, state)
    y = (states @ C[..., None]).squeeze(-1) if outputs else None
    return y, states[:, -1].clone()


def chunk_backward_plain(
    inputs: Tensors, A_DN: Tensor, state: Tensor, dy: Tensor | None, dstate: Tensor
) -> ChunkGradients:
    """``chunk_backward`` by torch."""
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
    before = decays[:, 0].clone()
    decays[:, 0] *= state
    decays[:, 1:] *= states[:, :-1]
    ddt = written * x + (decays * A_DN).sum(-1)
    dA_DN = torch.einsum("bqdn,bqd->dn", decays, dt)
    return ChunkGradients((written * dt, ddt, dB, dC), dA_DN, before)


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


def _fits(state: Tensor) -> bool:
    return state.device.type == "cpu" and state.dtype in (torch.float32, torch.float64)


def _room(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype)


def _arrays(*tensors: Tensor) -> list[Any]:
    return [x.detach().contiguous().numpy() for x in tensors]
