"""Who reduces the gradient of a parameter: one wrapper, or none."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

_NAME = "_gradient_claim"


def claim(parameter: Tensor, owner: object) -> None:
    """Note that ``owner`` reduces the parameter's gradient, for as long as it lives."""
    setattr(parameter, _NAME, _Claim(owner))


def is_claimed(parameter: Tensor) -> bool:
    """Whether a living owner reduces the parameter's gradient."""
    found = getattr(parameter, _NAME, None)
    return found is not None and found.owner() is not None


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
