"""Who reduces the gradient of a parameter: one wrapper, or none."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from megablocks_core.groups import Specs

_NAME = "_gradient_claim"


def claim(parameter: Tensor, owner: object) -> None:
    """Note that ``owner`` reduces the parameter's gradient, for as long as it lives."""
    setattr(parameter, _NAME, _Claim(owner))


def is_claimed(parameter: Tensor) -> bool:
    """Whether a living owner reduces the parameter's gradient."""
    found = getattr(parameter, _NAME, None)
    return found is not None and found.owner() is not None


def refuse_claimed(named: Iterable[tuple[str, nn.Parameter, Specs]]) -> None:
    """Raise if somebody reduces the gradient of one of these parameters.

    Raises:
        ValueError: It names the first.
    """
    for name, parameter, _ in named:
        if is_claimed(parameter):
            raise ValueError(
                f"parameter {name!r} has its gradient reduced by another wrapper or optimizer "
                "already; wrap a module once"
            )


def release(parameter: Tensor) -> None:
    """Forget the claim on a parameter."""
    if hasattr(parameter, _NAME):
        delattr(parameter, _NAME)


class _Claim:
    """Copies of a parameter are free: a claim pickles as nothing."""

    def __init__(self, owner: object) -> None:
        self.owner = weakref.ref(owner)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ())
