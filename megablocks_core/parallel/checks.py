"""A condition on values, checked without making the host wait for a device."""

from collections.abc import Callable

import torch
from torch import Tensor


def require(ok: Tensor, message: str, found: Callable[[], str] | None = None) -> None:
    """Raise unless the single value ``ok`` is true.

    On CPU a ``ValueError`` with ``message`` and what ``found`` tells of the values. In compiled
    code and on other devices torch's asynchronous assertion: a ``RuntimeError`` with
    ``message``, or an error of the device at its next use.
    """
    if torch.compiler.is_compiling() or ok.device.type != "cpu":
        torch.ops.aten._assert_async.msg(ok, message)
    elif not ok:
        raise ValueError(message if found is None else f"{message}; {found()}")
