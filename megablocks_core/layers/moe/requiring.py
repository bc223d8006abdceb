"""Conditions on numbers, and on values for code that must not read one on the host."""

from collections.abc import Callable
from numbers import Integral
from typing import TypeGuard

import torch
from torch import Tensor


def require(ok: Tensor, message: str, found: Callable[[], str] | None = None) -> None:
    """Raise unless the single value ``ok`` is true; where it is, nothing is read on the host.

    A ``ValueError`` with ``message``, or with what ``found`` says of the values. In compiled code
    and on a GPU it is torch's asynchronous assertion with ``message``.
    """
    if torch.compiler.is_compiling():
        torch.ops.aten._assert_async.msg(ok, message)
        return
    try:
        torch.ops.aten._assert_async.msg(ok, message)
    except RuntimeError:
        raise ValueError(message if found is None else found()) from None


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is a whole number, and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)
