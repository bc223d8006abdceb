"""The scan over chunks: states from chunk to chunk, outputs within.

Forward keeps the inputs and one state every ``_BLOCK`` tokens; backward goes through the blocks
from the last to the first and computes each again. The compiler sees one operator each way, so
that no length and no packing costs a compilation.

Dimensions: B rows, Q tokens of a chunk, n chunks, E documents, b blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megablocks_core.layers.ssm.functions.chunked.borders import Borders, BordersBack
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


def scan(
    name: str,
    inputs: Sequence[Tensor],
    constants: Sequence[Tensor],
    carry: Tensor,
    borders: Borders,
    *,
    outputs: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs [B n Q ...], the state behind the last chunk, and those of documents.

    Args:
        name: Of the recurrence.
        inputs: [B n Q ...] each.
        constants: Tensors without tokens.
        carry: The state before the first chunk [B state].
        borders: Of documents.
        outputs: Else outputs are [0].

    Returns:
        Outputs; the last state [B state]; the states behind the chunks ``borders.last``
        [E state], or [0].
    """
    y, last, finals, _ = _scan_op(name, list(inputs), list(constants), carry, outputs, *borders)
    return y, last, finals


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
    recurrence = _RECURRENCES[name]
    borders = borders._replace(last=None)
    transition, state = recurrence.state_map(scan, inputs, constants, like, borders)
    return transition.contiguous(), state


def _blocks(inputs: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """The chunks of each block."""
    count, size = inputs[0].shape[1:3]
    return pairwise([*range(0, count, max(1, _BLOCK // size)), count])


def _wide(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [x.to(dtype) for x in tensors]


@torch.library.custom_op("megablocks_core::chunk_scan", mutates_args=())
def _scan_op(
    name: str,
    inputs: Sequence[Tensor],
    constants: Sequence[Tensor],
    carry: Tensor,
    outputs: bool,
    first: Tensor | None,
    document: Tensor | None,
    initial: Tensor | None,
    last: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    recurrence, borders = _RECURRENCES[name], Borders(first, document, initial, last)
    few = _wide(constants, carry.dtype)
    state, finals, kept = carry, borders.no_finals(carry), []
    y = _no_outputs(recurrence, inputs, outputs)
    for start, stop in _blocks(inputs):
        kept.append(state)
        part = _wide([x[:, start:stop] for x in inputs], carry.dtype)
        here = borders.within(start, stop)
        of_block, behind = recurrence.forward(part, few, state, here, outputs)
        if of_block is not None:
            y[:, start:stop] = of_block
        state, finals = behind[-1], here.collect(finals, list(behind))
    return y, state.clone(), finals.clone(), torch.stack(kept)


@torch.library.custom_op("megablocks_core::chunk_scan_backward", mutates_args=())
def _backward_op(
    name: str,
    dy: Tensor,
    dstate: Tensor,
    dfinals: Tensor,
    inputs: Sequence[Tensor],
    constants: Sequence[Tensor],
    kept: Tensor,
    outputs: bool,
    first: Tensor | None,
    document: Tensor | None,
    initial: Tensor | None,
    last: Tensor | None,
) -> list[Tensor]:
    """Gradients of inputs, constants, carry and, if it is there, ``initial``."""
    recurrence, borders = _RECURRENCES[name], Borders(first, document, initial, last)
    few = _wide(constants, kept.dtype)
    dinputs = [torch.empty_like(x) for x in inputs]
    dfew = [torch.zeros_like(x) for x in few]
    dinitial = None if initial is None else torch.zeros_like(initial)
    for state, (start, stop) in reversed(list(zip(kept, _blocks(inputs), strict=True))):
        part = _wide([x[:, start:stop] for x in inputs], kept.dtype)
        way = BordersBack(borders.within(start, stop), dfinals, dinitial, stop - start)
        given = dy[:, start:stop].to(kept.dtype) if outputs else None
        found, of_constants, dstate = recurrence.backward(part, few, state, way, given, dstate)
        for whole, grad in zip(dinputs, found, strict=True):
            whole[:, start:stop] = grad
        for total, grad in zip(dfew, of_constants, strict=True):
            total += grad
    dconstants = [grad.to(x.dtype) for grad, x in zip(dfew, constants, strict=True)]
    return [*dinputs, *dconstants, dstate.clone(), *([] if dinitial is None else [dinitial])]


def _no_outputs(recurrence: Recurrence, inputs: Sequence[Tensor], outputs: bool) -> Tensor:
    """Room for outputs."""
    like = inputs[recurrence.like]
    return like.new_empty(like.shape if outputs else 0, dtype=inputs[0].dtype)


@_scan_op.register_fake
def _(
    name: str,
    inputs: Sequence[Tensor],
    constants: Sequence[Tensor],
    carry: Tensor,
    outputs: bool,
    *borders: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    blocks = -(inputs[0].shape[1] // -max(1, _BLOCK // inputs[0].shape[2]))
    return (
        _no_outputs(_RECURRENCES[name], inputs, outputs),
        carry.new_empty(carry.shape),
        Borders(*borders).no_finals(carry),
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
    kept: Tensor,
    outputs: bool,
    *borders: Any,
) -> list[Tensor]:
    initial = borders[2]
    like = [*inputs, *constants, dstate]
    return [torch.empty_like(x) for x in (like if initial is None else [*like, initial])]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.name, tensors, constants, _, ctx.outputs, *borders = inputs
    ctx.counts = len(tensors), len(constants)
    ctx.borders = [border is not None for border in borders]
    ctx.shapes = [(x.shape, x.dtype) for x in output[:3]]
    ctx.save_for_backward(*tensors, *constants, output[3], *(x for x in borders if x is not None))


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    many, few = ctx.counts
    saved = ctx.saved_tensors  # read once: under recomputation a second time is an error
    tensors, constants = saved[:many], saved[many : many + few]
    kept, *given = saved[many + few :]
    left = iter(given)
    borders = [next(left) if there else None for there in ctx.borders]
    grads = tuple(
        kept.new_zeros(shape, dtype=dtype) if grad is None else grad.contiguous()
        for grad, (shape, dtype) in zip(grads, ctx.shapes, strict=False)
    )
    found = _backward_op(
        ctx.name, *grads, list(tensors), list(constants), kept, ctx.outputs, *borders
    )
    dinitial = found[many + few + 1] if borders[2] is not None else None
    dinputs, dconstants, dcarry = found[:many], found[many : many + few], found[many + few]
    return None, dinputs, dconstants, dcarry, None, None, None, dinitial, None


_scan_op.register_autograd(_backward, setup_context=_save)
