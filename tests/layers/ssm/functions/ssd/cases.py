"""Scans that tests draw and run: their tensors, their recurrence, all their gradients."""

import torch

from megablocks_core.layers.ssm.functions.recurrences import ssd_recurrence


def sums_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def draw(rows, length, heads, groups, *, features=3, state=4, skip=None, states=0, strength=1.0):
    """x, dt, A, B, C, D and initial states in float64 as leaves; ``None`` for what is not there.

    Args:
        rows, length, heads, groups, features, state: Sizes.
        skip: Dimensions of D, 1 or 2.
        states: How many initial states.
        strength: Of decays.
    """
    torch.manual_seed(0)
    kind = {"dtype": torch.float64, "requires_grad": True}
    A = -strength * torch.rand(heads, dtype=torch.float64) - 0.01
    return [
        torch.randn(rows, length, heads, features, **kind),
        torch.rand(rows, length, heads, **kind),
        A.requires_grad_(),
        torch.randn(rows, length, groups, state, **kind),
        torch.randn(rows, length, groups, state, **kind),
        torch.randn((heads, features)[:skip], **kind) if skip else None,
        torch.randn(states, heads, features, state, **kind) if states else None,
    ]


def run(function, leaves, **options):
    """y, final states and the gradients of all leaves."""
    *tensors, D, state = leaves
    y, final = function(*tensors, D=D, initial_state=state, **options)
    loss = (y * (y.detach() + 1)).sum()
    if final is not None:
        loss = loss + (final * (final.detach() + 2)).sum()
    given = [leaf for leaf in leaves if leaf is not None]
    grads = torch.autograd.grad(loss, given, allow_unused=True, materialize_grads=True)
    return [y, *([] if final is None else [final]), *grads]


def recurrence(leaves, *, finals=True, **options):
    """The same by the recurrence; without ``finals`` the states take no part."""

    def function(*tensors, **others):
        y, final = ssd_recurrence(*tensors, **others)
        return y, final if finals else None

    return run(function, leaves, **options)
