"""Conditions on options, and on values without making the host wait for a device."""

import math
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


def check_tensors(**tensors: object) -> None:
    """Raise unless each is a tensor: a list or an array in its place is a usual slip."""
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} of type {type(value).__name__} must be a tensor")


def check_reduction(reduction: str) -> None:
    """Raise unless it is a name of how losses become one, or stay."""
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f'reduction={reduction!r} must be "none", "sum" or "mean"')


def check_positive(name: str, value: float | None) -> None:
    """Raise unless a bound or divisor is positive and finite, where there is one."""
    if value is None:
        return
    if not hasattr(value, "__float__") or not 0.0 < value < math.inf:
        raise ValueError(f"{name}={value!r} must be positive and finite")


def check_targets(
    targets: Tensor, *, ignore_index: int, label_smoothing: float, z_loss: float
) -> None:
    """Raise unless targets are integers and the terms of their cross-entropy are numbers."""
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise ValueError(
            f"targets of {targets.dtype} must be integers: the indices of classes "
            "(probabilities are not served)"
        )
    if not hasattr(ignore_index, "__index__"):
        raise ValueError(f"ignore_index={ignore_index!r} must be an integer")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing={label_smoothing} must lie between 0 and 1")
    if not 0.0 <= z_loss < math.inf:
        raise ValueError(f"z_loss={z_loss} must not be negative, and finite")


def check_vocab_size(vocab_size: int | None) -> None:
    """Raise unless it is a number of columns, where it is known."""
    if vocab_size is not None and not (hasattr(vocab_size, "__index__") and vocab_size > 0):
        raise ValueError(f"vocab_size={vocab_size!r} must be a whole number of at least 1")
