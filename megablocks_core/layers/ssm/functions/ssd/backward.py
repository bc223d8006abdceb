"""The scan backward: chunks are computed again, from states that forward kept."""

from __future__ import annotations

from torch import Tensor

from megablocks_core.layers.ssm.functions.ssd.backward_heads import BackwardHeads
from megablocks_core.layers.ssm.functions.ssd.chunks import Chunks, Inputs
from megablocks_core.layers.ssm.functions.ssd.gradients import Found, Gradients, Totals
from megablocks_core.layers.ssm.functions.ssd.plan import EVERY, plan_of, regions
from megablocks_core.layers.ssm.functions.ssd.rooms import Rooms
from megablocks_core.layers.ssm.functions.steps import wide


def empty_gradients(inputs: Inputs) -> Gradients:
    """Gradients with anything in them."""
    x, kind = inputs.x, wide(inputs.x)
    state = (x.shape[0], x.shape[2], x.shape[3], inputs.B.shape[-1])
    nothing = x.new_empty(0)
    return Gradients(
        *(part.new_empty(part.shape) for part in inputs[:5]),
        D=nothing if inputs.D is None else inputs.D.new_empty(inputs.D.shape),
        entries=nothing
        if inputs.entries is None
        else inputs.entries.new_empty(inputs.entries.shape),
        carry=x.new_empty(state, dtype=kind),
    )


def gradients_of(
    inputs: Inputs,
    states: Tensor,
    dy: Tensor,
    dfinal: Tensor,
    dstates: Tensor | None,
    chunk_size: int,
) -> Gradients:
    """Gradients in every input.

    Args:
        inputs: Those of forward.
        states: Those that forward gave.
        dy: Gradient in y [B L H P].
        dfinal: In the last state [B H P N].
        dstates: In the states before every chunk, if forward gave all [chunks B H P N].
        chunk_size: That of forward.
    """
    gradients = empty_gradients(inputs)
    gradients.carry.copy_(dfinal)
    rooms, every = Rooms(inputs.x, gradients.carry.dtype), EVERY if dstates is None else 1
    plan = plan_of(inputs.x, inputs.B, chunk_size)
    totals = Totals(inputs)
    for parts in regions(inputs.x, chunk_size, every, plan.rows):
        for region in reversed(parts):
            chunks = Chunks(inputs, region, rooms.dtype)
            found = Found(chunks)
            for lane in plan.lanes:
                heads = BackwardHeads(inputs, chunks, region, lane, rooms, min(plan.chunks, every))
                heads.run(found, gradients, states, dy, dstates, every)
            found.finish(inputs, chunks, region, gradients, totals)
    totals.write(gradients)
    return gradients
