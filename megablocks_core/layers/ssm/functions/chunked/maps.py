"""How many chunks together map the state before them to the one behind: without outputs.

Computed again in backward. The compiler sees one operator each way.

Dimensions: B rows, Q tokens of a chunk, n chunks, E documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megablocks_core.layers.ssm.functions.chunked.scan import Borders, enter, recurrence_of


def state_map(
    name: str, inputs: Sequence[Tensor], constants: Sequence[Tensor], like: Tensor, borders: Borders
) -> tuple[Tensor, Tensor]:
    """``s`` behind all chunks is ``compose(transition, s) + state`` with these two.

    The transition is zero if a document starts among the chunks.

    Args:
        name: Of the recurrence.
        inputs: [B n Q ...] each.
        constants: Tensors without tokens.
        like: A state [B state].
        borders: Of documents; ``last`` is not used.
    """
    first, document, initial, _ = borders
    transition, state = _map_op(name, list(inputs), list(constants), like, first, document, initial)
    return transition, state


def _map(
    name: str,
    counts: tuple[int, int],
    like: Tensor,
    borders: Borders,
    *tensors: Tensor,
) -> tuple[Tensor, Tensor]:
    """As a function of tensors alone: inputs, constants, ``initial``."""
    recurrence, (many, few) = recurrence_of(name), counts
    inputs, constants, initial = tensors[:many], tensors[many : many + few], tensors[many + few :]
    borders = borders._replace(initial=initial[0] if initial else None)
    wide = [[x.to(like.dtype) for x in each] for each in (inputs, constants)]
    transitions, additions, *_ = recurrence.prepare(*wide)
    whole, state = recurrence.identity(transitions[:, 0]), torch.zeros_like(like)
    for chunk in range(transitions.shape[1]):
        state = enter(borders, chunk, state)
        if borders.first is not None:
            whole = torch.where(borders.first[chunk], 0, whole)
        whole = recurrence.compose(transitions[:, chunk], whole)
        state = recurrence.compose(transitions[:, chunk], state) + additions[:, chunk]
    return whole.contiguous(), state


@torch.library.custom_op("megablocks_core::chunk_map", mutates_args=())
def _map_op(
    name: str,
    inputs: Sequence[Tensor],
    constants: Sequence[Tensor],
    like: Tensor,
    first: Tensor | None,
    document: Tensor | None,
    initial: Tensor | None,
) -> tuple[Tensor, Tensor]:
    given = [] if initial is None else [initial]
    borders = Borders(first, document)
    counts = len(inputs), len(constants)
    return _map(name, counts, like, borders, *inputs, *constants, *given)


@torch.library.custom_op("megablocks_core::chunk_map_backward", mutates_args=())
def _backward_op(
    name: str,
    dtransition: Tensor,
    dstate: Tensor,
    inputs: Sequence[Tensor],
    constants: Sequence[Tensor],
    first: Tensor | None,
    document: Tensor | None,
    initial: Tensor | None,
) -> list[Tensor]:
    """Gradients of inputs, constants and, if it is there, ``initial``."""
    given = [] if initial is None else [initial]
    counts = len(inputs), len(constants)
    function = partial(_map, name, counts, torch.empty_like(dstate), Borders(first, document))
    pull = torch.func.vjp(function, *inputs, *constants, *given)[1]
    return [grad.contiguous() for grad in pull((dtransition, dstate))]


@_map_op.register_fake
def _(
    name: str, inputs: Sequence[Tensor], constants: Sequence[Tensor], like: Tensor, *borders: Any
) -> tuple[Tensor, Tensor]:
    few = [x[:, :1].to(like.dtype) for x in inputs]
    wide = [x.to(like.dtype) for x in constants]
    transition = recurrence_of(name).prepare(few, wide)[0][:, 0]
    return like.new_empty(transition.shape), torch.empty_like(like)


@_backward_op.register_fake
def _(
    name: str, dtransition: Tensor, dstate: Tensor, inputs: Any, constants: Any, *borders: Any
) -> list[Tensor]:
    given = [] if borders[2] is None else [borders[2]]
    return [torch.empty_like(x) for x in (*inputs, *constants, *given)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.name, tensors, constants, _, *borders = inputs
    ctx.counts = len(tensors), len(constants)
    ctx.borders = [border is not None for border in borders]
    ctx.save_for_backward(*tensors, *constants, *(x for x in borders if x is not None))


def _backward(ctx: Any, dtransition: Tensor, dstate: Tensor) -> tuple[Any, ...]:
    many, few = ctx.counts
    saved = ctx.saved_tensors
    left = iter(saved[many + few :])
    borders = [next(left) if there else None for there in ctx.borders]
    grads = dtransition.contiguous(), dstate.contiguous()
    inputs, constants = list(saved[:many]), list(saved[many : many + few])
    found = _backward_op(ctx.name, *grads, inputs, constants, *borders)
    dinitial = found[many + few] if borders[2] is not None else None
    return None, found[:many], found[many : many + few], None, None, None, dinitial


_map_op.register_autograd(_backward, setup_context=_save)
