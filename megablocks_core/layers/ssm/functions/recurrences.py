"""The plain twins: each function of a whole sequence as a loop of steps over its tokens.

They are slow, keep every state for backward, and are what the chunked functions must equal.
Arguments are those of the functions they stand for; documents are gone through one by one.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from megablocks_core.layers.ssm.functions.steps import (
    causal_conv1d_step,
    gated_delta_step,
    selective_step,
    ssd_step,
    wide,
)

# Called with one token's tensors and ``state=``.
Step = Callable[..., tuple[Tensor, Tensor]]


def causal_conv1d_recurrence(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: bool = False,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``causal_conv1d``, token by token."""
    state = _states(x, (weight.shape[1] - 1, x.shape[2]), initial_state, cu_seqlens, x.dtype)

    def step(x: Tensor, *, state: Tensor) -> tuple[Tensor, Tensor]:
        return causal_conv1d_step(x, weight, bias, state=state, activation=activation)

    return _walk(step, (x,), state, cu_seqlens)


def selective_recurrence(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``selective_scan``, token by token."""
    state = _states(x, tuple(A.shape), initial_state, cu_seqlens, wide(x))

    def step(
        x: Tensor, dt: Tensor, B: Tensor, C: Tensor, *, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        return selective_step(x, dt, A, B, C, D=D, state=state)

    return _walk(step, (x, dt, B, C), state, cu_seqlens)


def ssd_recurrence(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``ssd_chunk_scan``, token by token."""
    shape = (x.shape[2], x.shape[3], B.shape[3])
    state = _states(x, shape, initial_state, cu_seqlens, wide(x))

    def step(
        x: Tensor, dt: Tensor, B: Tensor, C: Tensor, *, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        return ssd_step(x, dt, A, B, C, D=D, state=state)

    return _walk(step, (x, dt, B, C), state, cu_seqlens)


def gated_delta_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``gated_delta_rule``, token by token."""
    shape = (v.shape[2], k.shape[3], v.shape[3])
    state = _states(v, shape, initial_state, cu_seqlens, wide(q))
    return _walk(partial(gated_delta_step, scale=scale), (q, k, v, g, beta), state, cu_seqlens)


def _states(
    x: Tensor,
    shape: tuple[int, ...],
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The states before the first tokens, of every row or document."""
    if initial_state is not None:
        return initial_state.to(dtype)
    rows = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    return x.new_zeros((rows, *shape), dtype=dtype)


def _walk(
    step: Step, inputs: Sequence[Tensor], state: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Outputs [B L ...] and the states after the last tokens."""
    if cu_seqlens is None:
        return _walk_rows(step, inputs, state)
    bounds = cu_seqlens.tolist()
    # What stands behind the last document goes through a state that nobody sees.
    bounds.append(inputs[0].shape[1])
    states = [*state.split(1), torch.zeros_like(state[:1])]
    walks = [
        _walk_rows(step, [part[:, start:stop] for part in inputs], state)
        for start, stop, state in zip(bounds, bounds[1:], states, strict=False)
    ]
    return torch.cat([y for y, _ in walks], dim=1), torch.cat([last for _, last in walks[:-1]])


def _walk_rows(step: Step, inputs: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    outputs = []
    for token in range(inputs[0].shape[1]):
        y, state = step(*(part[:, token] for part in inputs), state=state)
        outputs.append(y)
    return torch.stack(outputs, dim=1) if outputs else _nothing(step, inputs, state), state


def _nothing(step: Step, inputs: Sequence[Tensor], state: Tensor) -> Tensor:
    """The output of no token [B 0 ...], of the shape that a token's would have."""
    like = [part.new_zeros(part.shape[0], *part.shape[2:]) for part in inputs]
    return step(*like, state=state)[0][:, None][:, :0]
