"""A tensor saved for backward by our own hooks, with the check that torch makes without hooks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Version:
    """How often a tensor had been changed in place when it was saved; holds no memory of it."""

    def __init__(self, x: Tensor) -> None:
        # An alias shares the count of changes, and goes on doing so without the memory.
        self._witness = x.detach()
        self._witness.data = torch.empty(0, dtype=x.dtype, device=x.device)
        self._saved = x._version
        self._what = f"{x.dtype} {list(x.shape)}"

    @property
    def current(self) -> bool:
        """Whether the tensor is as it was saved."""
        return self._witness._version == self._saved

    def counts(self, x: Tensor) -> bool:
        """Whether ``x`` shares the count of changes, as far as its number tells."""
        return self._witness._version == x._version

    def check(self) -> None:
        """Raise torch's error if the tensor was changed.

        Raises:
            RuntimeError: It was.
        """
        if not self.current:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {self._what} is at version {self._witness._version}; "
                f"expected version {self._saved} instead"
            )


class Held:
    """A tensor that stays where it is."""

    def __init__(self, x: Tensor) -> None:
        self._tensor, self._version = x, Version(x)

    def tensor(self) -> Tensor:
        """The tensor, if it was not changed."""
        self._version.check()
        return self._tensor


def hooks_around() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """The hooks (pack, unpack) that saved tensors pass through here; new ones would hide them."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore
