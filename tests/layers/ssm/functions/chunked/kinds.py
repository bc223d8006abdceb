"""The functions that are computed in chunks, each beside its twin, with tensors for them."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from megablocks_core.layers.ssm.functions.delta import gated_delta_rule
from megablocks_core.layers.ssm.functions.recurrences import (
    gated_delta_recurrence,
    selective_recurrence,
)
from megablocks_core.layers.ssm.functions.selective import selective_scan


class Kind(NamedTuple):
    """One function.

    Attributes:
        run: The function, of leaves and options.
        twin: Its recurrence.
        leaves: Tensors to differentiate in, of so many rows and tokens.
        entries: How many each leaf has of a token, or none.
        state: The shape of one state.
        transition: And of what maps one to another.
    """

    run: Callable
    twin: Callable
    leaves: Callable
    entries: tuple[int, ...]
    state: tuple[int, ...]
    transition: tuple[int, ...]


def _selective(function):
    def call(leaves, **options):
        x, dt, A, B, C, D = leaves
        return function(x, dt, A, B, C, D=D, **options)

    return call


def _selective_leaves(rows, length, dtype=torch.float64):
    found = [
        torch.randn(rows, length, 3),
        torch.rand(rows, length, 3),
        -torch.rand(3, 2) - 0.1,
        torch.randn(rows, length, 2),
        torch.randn(rows, length, 2),
        torch.randn(3),
    ]
    return [x.to(dtype).requires_grad_() for x in found]


def _delta(steps):
    def run(leaves, **options):
        return gated_delta_rule(*leaves, householders=steps, **options)

    def twin(leaves, cu_seqlens=None, **options):
        q, k, v, g, beta = leaves
        rows, length, heads, keys = q.shape
        every_q = torch.zeros(rows, length, steps, heads, keys, dtype=q.dtype)
        every_g = torch.zeros(rows, length, steps, heads, dtype=g.dtype)
        every_q[:, :, -1], every_g[:, :, 0] = q, g
        sums = None if cu_seqlens is None else steps * cu_seqlens
        o, final = gated_delta_recurrence(
            every_q.flatten(1, 2), k, v, every_g.flatten(1, 2), beta, cu_seqlens=sums, **options
        )
        return o.unflatten(1, (length, steps))[:, :, -1], final

    def leaves(rows, length, dtype=torch.float64):
        found = [
            torch.randn(rows, length, 2, 3),
            torch.nn.functional.normalize(torch.randn(rows, steps * length, 2, 3), dim=-1),
            torch.randn(rows, steps * length, 2, 4),
            -torch.rand(rows, length, 2),
            2 * torch.rand(rows, steps * length, 2),
        ]
        return [x.to(dtype).requires_grad_() for x in found]

    return Kind(run, twin, leaves, (1, steps, steps, 1, steps), (2, 3, 4), (2, 3, 3))


KINDS = {
    "selective": Kind(
        _selective(selective_scan),
        _selective(selective_recurrence),
        _selective_leaves,
        (1, 1, 0, 1, 1, 0),
        (3, 2),
        (3, 2),
    ),
    **{f"delta {steps}": _delta(steps) for steps in (1, 2, 3)},
}


def states(kind, count):
    """Initial states to differentiate in."""
    return torch.randn(count, *kind.state, dtype=torch.float64, requires_grad=True)


def sums(lengths):
    """``cu_seqlens`` of documents."""
    return torch.tensor([0, *lengths]).cumsum(0)
