"""Conditions on options, and on values without making the host wait for a device."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

REDUCTIONS = ("mean", "sum")  # of gradients over ranks


def require(ok: Tensor, message: str, found: Callable[[], str] | None = None) -> None:
    """Raise unless the single value ``ok`` is true; where it is, nothing is read on the host.

    On CPU a ``ValueError`` with ``message``, or with what ``found`` says of the values. In
    compiled code and on other devices torch's asynchronous assertion: a ``RuntimeError`` with
    ``message``, or an error of the device at its next use.
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


def check_tensors(**tensors: object) -> None:
    """Raise unless each is a tensor: a list or an array in its place is a usual slip."""
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} of type {type(value).__name__} must be a tensor")


def check_module(module: object) -> None:
    """Raise unless it is a module."""
    if not isinstance(module, nn.Module):
        raise ValueError(f"module={module!r} must be a module")


def check_parameters(given: object) -> nn.Module | Tensor | list[Tensor]:
    """What can be walked twice of a module, a tensor or tensors; raise unless it is one of them."""
    if isinstance(given, nn.Module | Tensor):
        return given
    found = as_list(given)
    for one in found:
        if not isinstance(one, Tensor):
            held = "" if one is given else f" with {one!r} in it"
            raise ValueError(
                f"module_or_parameters={given!r}{held} must be a module, a parameter or parameters"
            )
    return found


def as_list(given: Any) -> list[Any]:
    """What is given, in a list; of what is no collection, such as a tensor or a word, one of it."""
    plain = isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping | Tensor)
    return list(given) if plain else [given]


def check_flags(**flags: object) -> None:
    """Raise unless each is true or false: a word in its place would count as true."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r} must be True or False")


def check_number(name: str, value: object, rule: str, ok: Callable[[float], bool]) -> None:
    """Raise unless it is a real number, and no bool, that is ``ok``; a NaN never is."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or math.isnan(value) or not ok(value):  # type: ignore[arg-type]
        raise ValueError(f"{name}={value!r} must be {rule}")


def check_whole(name: str, value: object, *, least: int, most: int | None = None) -> None:
    """Raise unless it is a whole number, and no bool, from ``least`` to ``most``."""
    if not is_whole(value) or value < least or (most is not None and value > most):
        rule = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name}={value!r} must be a whole number {rule}")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise unless it is one of a few words."""
    if not isinstance(value, str) or value not in choices:
        *others, last = (f'"{choice}"' for choice in choices)
        raise ValueError(f"{name}={value!r} must be {', '.join(others)} or {last}")


def check_floating(name: str, dtype: object) -> None:
    """Raise unless it is a dtype in which sums and products can be taken."""
    if (
        not isinstance(dtype, torch.dtype)
        or not dtype.is_floating_point
        or dtype.itemsize < 2  # torch has conversions for them, and no sums
    ):
        raise ValueError(f"{name}={dtype!r} must be a floating-point dtype of at least 16 bits")


def check_words(name: str, words: object) -> None:
    """Raise unless it is a tuple or list of words: of one word each letter would be one."""
    if not isinstance(words, tuple | list) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"{name}={words!r} must be a tuple of patterns, which are strings")


def check_mapping(name: str, value: object, keys: Sequence[str] = ()) -> None:
    """Raise unless it is a mapping that has ``keys``."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}={value!r} must be a mapping")
    if missing := [key for key in keys if key not in value]:
        raise ValueError(f"{name} of {list(value)} must have {missing}")


def check_groups(name: str, groups: object) -> list[Mapping[str, Any]]:
    """Parameter groups in a list; raise unless each is a mapping with "params"."""
    if not isinstance(groups, Iterable) or isinstance(groups, str | bytes | Mapping | Tensor):
        raise ValueError(f"{name}={groups!r} must be an iterable of parameter groups")
    found = list(groups)
    for index, group in enumerate(found):
        check_mapping(f"{name}[{index}]", group, ("params",))
    return found


def check_reduction(reduction: object) -> None:
    """Raise unless it is a name of how losses become one, or stay."""
    check_choice("reduction", reduction, ("none", "sum", "mean"))


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
