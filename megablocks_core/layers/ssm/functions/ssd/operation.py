"""The scan as one step of autograd, and as one operation for the compiler.

The compiler sees no loop over chunks, so that neither lengths nor documents enter its graph.
Kept for backward are the inputs, and the state before every few chunks.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megablocks_core.layers.kernels import triton_serves
from megablocks_core.layers.ssm.functions.ssd.backward import empty_gradients, gradients_of
from megablocks_core.layers.ssm.functions.ssd.chunks import Inputs
from megablocks_core.layers.ssm.functions.ssd.forward import Scanned, empty_results, scan
from megablocks_core.layers.ssm.functions.ssd.plan import EVERY


def chunked_scan(
    inputs: Inputs, carry: Tensor | None, *, chunk_size: int, every_chunk: bool = False
) -> Scanned:
    """``scan``, differentiable; ``states`` has a gradient if it holds those of every chunk."""
    return Scanned(*_Scan.apply(chunk_size, every_chunk, carry, *inputs))


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, chunk_size: int, every_chunk: bool, carry: Tensor | None, *inputs: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        run = _scan_operation if torch.compiler.is_compiling() else _scan
        y, final, states = run(list(inputs), carry, chunk_size, every_chunk)
        ctx.chunk_size, ctx.every_chunk = chunk_size, every_chunk
        ctx.save_for_backward(*inputs, states)
        if not every_chunk:
            ctx.mark_non_differentiable(states)
        return y, final, states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dfinal: Tensor, dstates: Tensor) -> tuple[Any, ...]:
        *inputs, states = ctx.saved_tensors
        run = _gradients_operation if torch.compiler.is_compiling() else _gradients
        further = dstates if ctx.every_chunk else None
        *found, carry = run(inputs, states, dy, dfinal, further, ctx.chunk_size)
        wants_carry, *wants = ctx.needs_input_grad[2:-1]  # the last one tells documents
        gradients = [x if wanted else None for x, wanted in zip(found, wants, strict=True)]
        return None, None, carry if wants_carry else None, *gradients, None


def _scan(
    inputs: list[Tensor | None], carry: Tensor | None, chunk_size: int, every_chunk: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if triton_serves(*inputs, carry):
        return _scan_in_triton(inputs, carry, chunk_size, every_chunk)
    y, final, states = scan(_named(inputs), carry, chunk_size, every_chunk)
    return y, final, states


def _scan_in_triton(
    inputs: list[Tensor | None], carry: Tensor | None, chunk_size: int, every_chunk: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from megablocks_core.layers.kernels.sequences import scan as kernels

    named = _named(inputs)
    y, states = kernels.scan(*named, carry=carry, chunk_size=chunk_size)
    every, whole = 1 if every_chunk else EVERY, named.x.shape[1] // chunk_size
    # Copies: results of an operation share no memory, and no other states are kept for backward.
    return y, states[-1].clone(), torch.cat((states[:whole:every], states[whole:-1]))


def _gradients(
    inputs: list[Tensor | None],
    states: Tensor,
    dy: Tensor,
    dfinal: Tensor,
    dstates: Tensor | None,
    chunk_size: int,
) -> list[Tensor]:
    named = _named(inputs)
    if not triton_serves(*inputs, dy, dfinal, dstates):
        return list(gradients_of(named, states, dy, dfinal, dstates, chunk_size))
    from megablocks_core.layers.kernels.sequences import scan as kernels

    given = {"carry": states[0], "dy": dy, "dfinal": dfinal, "dstates": dstates}
    gradients = kernels.scan_gradients(*named, **given, chunk_size=chunk_size)
    return [dy.new_empty(0) if each is None else each for each in gradients]


def _named(inputs: list[Tensor | None]) -> Inputs:
    return Inputs(*inputs)  # pyright: ignore[reportArgumentType]


_scan_operation = torch.library.custom_op("megablocks_core::ssd_scan", _scan, mutates_args=())
_gradients_operation = torch.library.custom_op(
    "megablocks_core::ssd_scan_backward", _gradients, mutates_args=()
)


@_scan_operation.register_fake
def _(
    inputs: list[Tensor | None], carry: Tensor | None, chunk_size: int, every_chunk: bool
) -> tuple[Tensor, Tensor, Tensor]:
    y, final, states = empty_results(_named(inputs), chunk_size, every_chunk)
    return y, final, states


@_gradients_operation.register_fake
def _(inputs: list[Tensor | None], *others: Any) -> list[Tensor]:
    return list(empty_gradients(_named(inputs)))
