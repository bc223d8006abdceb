"""The scan over chunks: states from chunk to chunk, outputs within.

Forward keeps the inputs and one state every ``_BLOCK`` tokens; backward goes through the blocks
from the last to the first and computes each again. The compiler sees one operator each way, so
that no length and no packing costs a compilation.

Dimensions: B rows, Q tokens of a chunk, n chunks, E documents, b blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megablocks_core.layers.ssm.functions.chunked.recurrence import Recurrence

# Tokens that are computed at once.
_BLOCK = 1024

# By the name that the operators take.
_RECURRENCES: dict[str, Recurrence] = {}


def recurrence_of(name: str) -> Recurrence:
    """The recurrence that is known as ``name``."""
    return _RECURRENCES[name]


def register(name: str, recurrence: Recurrence) -> None:
    """Make ``recurrence`` known as ``name``."""
    _RECURRENCES[name] = recurrence


class Borders(NamedTuple):
    """What becomes of the state between chunks.

    Attributes:
        first: Whether a chunk starts a document [n].
        document: Its document [n].
        initial: The states before documents [E+1 state]; ``None``: zeros.
        last: The last chunk of each document whose state is wanted [E].
    """

    first: Tensor | None = None
    document: Tensor | None = None
    initial: Tensor | None = None
    last: Tensor | None = None


def scan(
    name: str,
    inputs: Sequence[Tensor],
    constants: Sequence[Tensor],
    carry: Tensor,
    borders: Borders,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs [B n Q ...], the state behind the last chunk, and those of documents.

    Args:
        name: Of the recurrence.
        inputs: [B n Q ...] each.
        constants: Tensors without tokens.
        carry: The state before the first chunk [B state].
        borders: Of documents.

    Returns:
        Outputs; the last state [B state]; the states behind the chunks ``borders.last``
        [E state], or [0].
    """
    y, last, finals, _ = _scan_op(name, list(inputs), list(constants), carry, *borders)
    return y, last, finals


def _block(
    recurrence: Recurrence,
    start: int,
    inputs: Sequence[Tensor],
    constants: Sequence[Tensor],
    state: Tensor,
    finals: Tensor,
    borders: Borders,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs of some chunks, of which ``start`` is the first, and the states behind them."""
    inputs, constants = ([x.to(state.dtype) for x in each] for each in (inputs, constants))
    transitions, additions, *further = recurrence.prepare(inputs, constants)
    before, behind = [], []
    for chunk in range(transitions.shape[1]):
        state = enter(borders, start + chunk, state)
        before.append(state)
        state = recurrence.compose(transitions[:, chunk], state) + additions[:, chunk]
        behind.append(state)
    y = recurrence.outputs(torch.stack(before, dim=1), further, inputs, constants)
    if borders.last is not None:
        ends = torch.stack(behind, dim=1)[0]
        place = borders.last - start
        here = ((place >= 0) & (place < len(ends))).view(-1, *(1,) * (ends.dim() - 1))
        finals = torch.where(here, ends[place.clamp(0, len(ends) - 1)], finals)
    return y, state, finals


def enter(borders: Borders, chunk: int, state: Tensor) -> Tensor:
    """The state before ``chunk``: the initial one where a document starts [B state]."""
    if borders.first is None:
        return state
    initial = torch.zeros_like(state)
    if borders.initial is not None and borders.document is not None:
        initial = borders.initial.index_select(0, borders.document[chunk : chunk + 1])
    return torch.where(borders.first[chunk], initial, state)


def _starts(inputs: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """The chunks of each block."""
    count, size = inputs[0].shape[1:3]
    return pairwise([*range(0, count, max(1, _BLOCK // size)), count])


@torch.library.custom_op("megablocks_core::chunk_scan", mutates_args=())
def _scan_op(
    name: str,
    inputs: Sequence[Tensor],
    constants: Sequence[Tensor],
    carry: Tensor,
    first: Tensor | None,
    document: Tensor | None,
    initial: Tensor | None,
    last: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    borders = Borders(first, document, initial, last)
    state, finals = carry, _no_finals(carry, last)
    outputs, kept = [], []
    for start, stop in _starts(inputs):
        kept.append(state)
        part = [x[:, start:stop] for x in inputs]
        y, state, finals = _block(
            _RECURRENCES[name], start, part, constants, state, finals, borders
        )
        outputs.append(y.to(inputs[0].dtype))
    return torch.cat(outputs, dim=1), state.clone(), finals.clone(), torch.stack(kept)


@torch.library.custom_op("megablocks_core::chunk_scan_backward", mutates_args=())
def _backward_op(
    name: str,
    dy: Tensor,
    dstate: Tensor,
    dfinals: Tensor,
    inputs: Sequence[Tensor],
    constants: Sequence[Tensor],
    kept: Tensor,
    first: Tensor | None,
    document: Tensor | None,
    initial: Tensor | None,
    last: Tensor | None,
) -> list[Tensor]:
    """Gradients of inputs, constants, carry and, if it is there, ``initial``."""
    recurrence, many, few = _RECURRENCES[name], len(inputs), len(constants)
    given = [] if initial is None else [initial]
    parts: list[Sequence[Tensor]] = []
    shared = [torch.zeros_like(x) for x in (*constants, *given)]
    for index, (start, stop) in reversed(list(enumerate(_starts(inputs)))):
        pull = torch.func.vjp(
            partial(
                _flat_block, recurrence, start, (many, few), Borders(first, document, None, last)
            ),
            *(x[:, start:stop] for x in inputs),
            *constants,
            kept[index],
            _no_finals(kept[index], last),
            *given,
        )[1]
        found = pull((dy[:, start:stop], dstate, dfinals))
        parts.append(found[:many])
        dstate, dfinals = found[many + few : many + few + 2]
        own = (*found[many : many + few], *found[many + few + 2 :])
        shared = [total + part for total, part in zip(shared, own, strict=True)]
    gathered = [torch.cat(each[::-1], dim=1) for each in zip(*parts, strict=True)]
    return [*gathered, *shared[:few], dstate.clone(), *shared[few:]]


def _flat_block(
    recurrence: Recurrence,
    start: int,
    counts: tuple[int, int],
    borders: Borders,
    *tensors: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """``_block`` as a function of tensors alone: inputs, constants, state, finals, ``initial``."""
    many, few = counts
    inputs, constants = tensors[:many], tensors[many : many + few]
    state, finals, *initial = tensors[many + few :]
    borders = borders._replace(initial=initial[0] if initial else None)
    y, state, finals = _block(recurrence, start, inputs, constants, state, finals, borders)
    return y.to(inputs[0].dtype), state, finals


def _no_finals(state: Tensor, last: Tensor | None) -> Tensor:
    return state.new_zeros(0) if last is None else state.new_zeros(len(last), *state.shape[1:])


@_scan_op.register_fake
def _(
    name: str, inputs: Sequence[Tensor], constants: Sequence[Tensor], carry: Tensor, *borders: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    size = max(1, _BLOCK // inputs[0].shape[2])
    blocks = -(inputs[0].shape[1] // -size)
    few = [x[:, :1].to(carry.dtype) for x in inputs]
    wide = [x.to(carry.dtype) for x in constants]
    recurrence = _RECURRENCES[name]
    like = recurrence.outputs(carry[:, None], recurrence.prepare(few, wide)[2:], few, wide)
    shape = (like.shape[0], inputs[0].shape[1], *like.shape[2:])
    y = carry.new_empty(shape, dtype=inputs[0].dtype)
    return (
        y,
        torch.empty_like(carry),
        _no_finals(carry, borders[3]),
        carry.new_empty((blocks, *carry.shape)),
    )


@_backward_op.register_fake
def _(
    name: str,
    dy: Tensor,
    dstate: Tensor,
    dfinals: Tensor,
    inputs: Any,
    constants: Any,
    *others: Any,
) -> list[Tensor]:
    initial = others[3]
    like = [*inputs, *constants, dstate]
    return [torch.empty_like(x) for x in (like if initial is None else [*like, initial])]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.name, tensors, constants, carry, *borders = inputs
    ctx.counts = len(tensors), len(constants)
    ctx.borders = [border is not None for border in borders]
    ctx.shapes = [(x.shape, x.dtype) for x in output[:3]]
    ctx.save_for_backward(*tensors, *constants, output[3], *(x for x in borders if x is not None))


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    many, few = ctx.counts
    tensors, constants = ctx.saved_tensors[:many], ctx.saved_tensors[many : many + few]
    kept, *given = ctx.saved_tensors[many + few :]
    left = iter(given)
    borders = [next(left) if there else None for there in ctx.borders]
    grads = tuple(
        kept.new_zeros(shape, dtype=dtype) if grad is None else grad.contiguous()
        for grad, (shape, dtype) in zip(grads, ctx.shapes, strict=False)
    )
    found = _backward_op(ctx.name, *grads, list(tensors), list(constants), kept, *borders)
    dinitial = found[many + few + 1] if borders[2] is not None else None
    return (
        None,
        found[:many],
        found[many : many + few],
        found[many + few],
        None,
        None,
        dinitial,
        None,
    )


_scan_op.register_autograd(_backward, setup_context=_save)
