"""Whether an optimizer works element by element, and what it keeps: found by running it.

A flat range of a parameter may be stepped in its place only if the update of an element depends
on nothing but the past of that element. Optimizers with norms or factors of whole tensors do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Classes of such a name use the whole tensor: its norm, its rows and columns, or its shape.
_WHOLE_TENSOR = ("adafactor", "dion", "lamb", "lars", "lbfgs", "muon", "shampoo", "soap")
_STEPS = 3
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


class StateField(NamedTuple):
    """What an optimizer keeps for a parameter under one name.

    Attributes:
        name: The key in its state.
        elements: Whether it is one value for each element, or one number.
        dtype: Of the tensor.
        on_host: Whether it stays in host memory.
        kind: The Python type of a number that is no tensor, or ``None``.
    """

    name: str
    elements: bool
    dtype: torch.dtype
    on_host: bool = False
    kind: type | None = None


class Kept(NamedTuple):
    """What an optimizer keeps.

    Attributes:
        fields: For a parameter that it has stepped.
        at_once: Whether it makes them when it is made, and not at a parameter's first step.
        defaults: Its options.
    """

    fields: list[StateField]
    at_once: bool
    defaults: dict[str, Any]


def check_optimizer_class(optimizer_class: object) -> None:
    """Raise ``ValueError`` unless it is a class of torch's optimizers."""
    if not isinstance(optimizer_class, type) or not issubclass(
        optimizer_class, torch.optim.Optimizer
    ):
        raise ValueError(
            f"optimizer_class={optimizer_class!r} must be a torch.optim.Optimizer, the class itself"
        )


class OptimizerMaker:
    """Makes optimizers of one class, and knows what they keep.

    Args:
        optimizer_class: A torch optimizer.
        hyperparameters: Those that each is made with.
    """

    def __init__(
        self, optimizer_class: type[torch.optim.Optimizer], hyperparameters: Mapping[str, Any]
    ) -> None:
        self._class, self._hyperparameters = optimizer_class, dict(hyperparameters)

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """An optimizer of parameter groups."""
        return self._class(groups, **self._hyperparameters)

    def check(self, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Raise unless it can step ranges under each group's options; return its defaults.

        Raises:
            ValueError: See ``probe``.
        """
        kept = []
        for group in groups:
            options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            for dtype, device in {(one.dtype, one.device) for one in group["params"]}:
                wide = torch.promote_types(dtype, torch.float32)
                kept.append(self.kept(options, torch.empty(0, dtype=wide, device=device)))
        return kept[0].defaults

    def kept(self, options: Mapping[str, Any], like: Tensor) -> Kept:
        """What it keeps for a tensor like ``like`` under a group's options; see ``probe``."""
        return probe(
            self._class,
            self._hyperparameters,
            options=options,
            dtype=like.dtype,
            device=like.device,
        )


def probe(
    optimizer_class: type[torch.optim.Optimizer],
    hyperparameters: Mapping[str, Any],
    *,
    options: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
) -> Kept:
    """Run a few steps on a small tensor, whole and in two ranges, and compare.

    A class may answer for itself by an attribute ``elementwise``; ``True`` spares it the test of
    its name, not the run.

    Args:
        optimizer_class: A torch optimizer.
        hyperparameters: Those that it is made with.
        options: Those of a group.
        dtype: Of what it steps: float32 or float64.
        device: Where.

    Returns:
        What it keeps.

    Raises:
        ValueError: It does not work element by element, cannot run on ranges, keeps a state that
            is neither, or keeps numbers of its own in its groups.
    """
    name = optimizer_class.__name__
    answer = getattr(optimizer_class, "elementwise", None)
    if answer is False or (answer is None and any(w in name.lower() for w in _WHOLE_TENSOR)):
        raise _refusal(name, "works on whole tensors")
    whole = torch.linspace(-1.0, 1.0, 12, dtype=dtype, device=device).view(3, 4)
    parts = [part.clone() for part in whole.flatten().split([5, 7])]
    first = optimizer_class([{"params": [whole], **options}], **hyperparameters)
    at_once = bool(first.state)
    try:
        second = optimizer_class([{"params": parts, **options}], **hyperparameters)
        _let_move(first, second)
        before = [_numbers(group) for group in first.param_groups]
        for step in range(_STEPS):
            whole.grad = (whole * (step + 2)).sin() * 10.0 ** (2 * step - 1)
            for part, gradient in zip(parts, whole.grad.flatten().split([5, 7]), strict=True):
                part.grad = gradient.clone()
            first.step()
            second.step()
    except Exception as error:
        raise _refusal(name, f"cannot run on ranges ({type(error).__name__}: {error})") from error
    if [_numbers(group) for group in first.param_groups] != before:
        raise _refusal(name, "keeps numbers of its own in its parameter groups")
    tolerance = _TOLERANCE[dtype]
    if not torch.allclose(torch.cat(parts), whole.flatten(), rtol=tolerance, atol=tolerance):
        raise _refusal(name, "steps a range otherwise than the whole tensor")
    fields = [
        _field(name, key, value, whole)
        for key, value in first.state[whole].items()
        if value is not None
    ]
    return Kept(fields, at_once, first.defaults)


def _let_move(*optimizers: torch.optim.Optimizer) -> None:
    """At a rate of 0, as where a warm-up starts, all optimizers are alike."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        if "lr" in group:
            rate = group["lr"]
            group["lr"] = torch.full_like(rate, 0.1) if isinstance(rate, Tensor) else 0.1


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for key, value in group.items()
        if key != "params"
    }


def _field(name: str, key: str, value: Any, whole: Tensor) -> StateField:
    if isinstance(value, Tensor) and value.numel() == whole.numel():
        return StateField(key, True, value.dtype)
    if isinstance(value, Tensor) and value.numel() == 1:
        return StateField(key, False, value.dtype, value.device.type == "cpu")
    if isinstance(value, int | float):
        dtype = torch.float64 if isinstance(value, float) else torch.int64
        return StateField(key, False, dtype, True, type(value))
    what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise _refusal(name, f"keeps {key!r} of {what}, not a number or one for each element")


def _refusal(name: str, reason: str) -> ValueError:
    return ValueError(
        f"optimizer_class={name} {reason}; a sharded optimizer steps flat ranges of parameters, "
        "so it must work element by element"
    )
